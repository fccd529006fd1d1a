"""Generators of the two schedules whose executed order torch does not hand out reliably.

One stage per rank. Notation: S stages, M microbatches. They follow what the schedule classes of
``torch.distributed.pipelining`` execute, not the order those classes print.
"""

from __future__ import annotations

from timelyfreeze.schedule.order import Action, ActionKind, ScheduleOrder, build_order
from timelyfreeze.settings import key


def gpipe_order(n_stages: int, n_microbatches: int) -> ScheduleOrder:
    """All forwards, then all backwards, on every stage.

    Row s is F0 .. F(M-1) B0 .. B(M-1) of stage s.
    """
    _check_counts(n_stages, n_microbatches, min_microbatches=1)
    return build_order(
        [
            [
                Action(stage, kind, microbatch)
                for kind in (ActionKind.FORWARD, ActionKind.FULL_BACKWARD)
                for microbatch in range(n_microbatches)
            ]
            for stage in range(n_stages)
        ]
    )


def one_f_one_b_order(n_stages: int, n_microbatches: int) -> ScheduleOrder:
    """1F1B: fill the pipeline, then one backward for every forward, then drain.

    Stage s runs S - s forwards first, so that its first backward is due just as the gradient of
    microbatch 0 arrives, and never holds the activations of more than S - s microbatches. M is S or
    more. Row s is F0 .. F(S-s-1), then B0 F(S-s) B1 F(S-s+1) .., then the last Bs.
    """
    _check_counts(n_stages, n_microbatches, min_microbatches=n_stages)
    rows = []
    for stage in range(n_stages):
        fill = n_stages - stage
        row = [Action(stage, ActionKind.FORWARD, microbatch) for microbatch in range(fill)]
        for microbatch in range(n_microbatches):
            row.append(Action(stage, ActionKind.FULL_BACKWARD, microbatch))
            if microbatch + fill < n_microbatches:
                row.append(Action(stage, ActionKind.FORWARD, microbatch + fill))
        rows.append(row)
    return build_order(rows)


def _check_counts(n_stages: int, n_microbatches: int, *, min_microbatches: int) -> None:
    if n_stages < 1:
        raise ValueError(f"the number of stages is {n_stages}; it must be at least 1")
    if n_microbatches < min_microbatches:
        raise ValueError(
            f"the number of microbatches is {n_microbatches}; this schedule with {n_stages} stages "
            f"needs at least {min_microbatches} ({key('microbatches')})"
        )
