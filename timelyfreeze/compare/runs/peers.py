"""What a user would do without freezing, to be done in the time of a run with it.

A peer trains with method none, and with less work than the run of none beside it:

- ``fewer_steps``: fewer steps, the learning-rate schedule squeezed with them;
- ``fewer_microbatches``: as many steps, each over fewer microbatches.

It belongs to one freezing method, whose time it is given: ``fewer_steps_for_apf``. How much it
trains follows from that time and from the run of none.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from timelyfreeze.records import STEPS
from timelyfreeze.schedule import ActionKind, build_dag, makespan

if TYPE_CHECKING:
    from timelyfreeze.compare.runs.run import Run

FEWER_STEPS, FEWER_MICROBATCHES = "fewer_steps", "fewer_microbatches"
PEERS = (FEWER_STEPS, FEWER_MICROBATCHES)
# What a peer changes of the run of none. Values differ from seed to seed, as times do.
PEER_KEYS = frozenset({
    "training.steps", "training.local_batch_size", "training.global_batch_size",
    "lr_scheduler.warmup_steps", "lr_scheduler.total_steps", "validation.freq",
})  # fmt: skip
_FOR = "_for_"
_CSV = "parallelism.pipeline_parallel_schedule_csv"
# Durations of actions relative to each other: F = dX = dW.
_LENGTHS = {kind: 2.0 if kind is ActionKind.FULL_BACKWARD else 1.0 for kind in ActionKind}


def peer_name(peer: str, method: str) -> str:
    """Return what stands in place of a method for the ``peer`` of a freezing method."""
    return f"{peer}{_FOR}{method}"


def split_peer(name: str) -> tuple[str, str] | None:
    """Return peer and freezing method of what ``peer_name`` gives; None for any other name."""
    peer, _, method = name.partition(_FOR)
    return (peer, method) if peer in PEERS and method else None


def freezes(method: str) -> bool:
    """Return whether a run of that name freezes anything."""
    return method != "none" and split_peer(method) is None


def fewer_steps(none: Run, seconds: float) -> dict[str, Any]:
    """Return the keys of a run of ``none`` with as many steps as fit into ``seconds``, 1 at least.

    Warm-up and all of the learning-rate schedule are squeezed in proportion. Validations are about
    as many as before, and one is after the last step. A method that takes no less time than none
    leaves all steps.

    Raises:
        ValueError: If the times of some steps are not known, or not a single step fits.
    """
    n_before = none.summary.steps
    if len(none.step_ends) != n_before:
        raise ValueError(
            f"{none.folder} has the times of {len(none.step_ends)} of {n_before} steps in "
            f"{STEPS.name}; all are needed"
        )
    n_steps = bisect.bisect_right(none.step_ends, seconds)
    if n_steps == 0:
        raise ValueError(f"not even one step of {none.folder} fits into {seconds:.4g} s")
    return with_steps(none, n_steps)


def with_steps(none: Run, n_steps: int) -> dict[str, Any]:
    """Return the keys of a run of ``none`` of another length, its schedules in proportion."""
    n_before = none.summary.steps
    keys: dict[str, Any] = {"training.steps": n_steps}
    for key in ("lr_scheduler.warmup_steps", "lr_scheduler.total_steps"):
        if (length := none.settings.get(key)) is not None:
            keys[key] = round(length * n_steps / n_before)
    if (interval := none.settings.get("validation.freq")) is not None:
        keys["validation.freq"] = max(1, round(interval * n_steps / n_before))
    return keys


def fewer_microbatches(none: Run, seconds: float) -> dict[str, Any]:
    """Return the keys of a run of ``none`` whose batches have microbatches for ``seconds`` only.

    How much shorter a batch of fewer microbatches is follows from its schedule, all stages alike
    and F = dX = dW; what it really took is in the table.

    Raises:
        ValueError: If the schedule is one of a CSV file, or no number of microbatches will do.
    """
    settings = none.settings
    if settings.get(_CSV):
        raise ValueError(f"{_CSV} is {settings[_CSV]!r}, which is for one number of microbatches")
    n_ranks = int(_setting(settings, "parallelism.pipeline_parallel_degree"))
    size = int(_setting(settings, "parallelism.pipeline_parallel_microbatch_size"))
    n_examples = int(_setting(settings, "training.local_batch_size"))
    n_before = n_examples // size
    length = _length(none.schedule, n_ranks, n_before)
    for n in range(n_before, 0, -1):
        try:
            expected = none.seconds * _length(none.schedule, n_ranks, n) / length
        except ValueError:  # a schedule may want a multiple of something
            continue
        if expected <= seconds:
            keys = {"training.local_batch_size": n * size}
            if (whole := settings.get("training.global_batch_size", -1)) > 0:
                keys["training.global_batch_size"] = whole * n // n_before
            return keys
    raise ValueError(
        f"no number of microbatches that {none.schedule} can have fits into {seconds:.4g} s"
    )


def _setting(settings: Mapping[str, Any], key: str) -> Any:
    if key not in settings:
        raise ValueError(f"the run of none does not say {key}")
    return settings[key]


def _length(schedule: str, n_ranks: int, n_microbatches: int) -> float:
    """Return how long a batch is, in forwards of one microbatch on one rank."""
    # Imported late: it loads torch, which the rest does without.
    from timelyfreeze.runtime import named_order, stages_per_rank

    n_stages = stages_per_rank(schedule) or 1
    dag = build_dag(named_order(schedule, n_ranks, n_microbatches, stages_per_rank=n_stages))
    return makespan(dag, [_LENGTHS[action.kind] for action in dag.actions])
