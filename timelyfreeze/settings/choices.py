"""What a user chooses about freezing, as the library takes it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from timelyfreeze.settings.phases import PhaseSchedule

ALL_OR_NOTHING = "all_or_nothing"
KEEP_CHAIN = "keep_chain"
FIRST_STAGE_MODES = (ALL_OR_NOTHING, KEEP_CHAIN)

OFF = "off"
USE = "use"
PLAN = "plan"
CASCADES = (OFF, USE, PLAN)

DEVICE = "device"
HOST = "host"
SCORE_MEMORIES = (DEVICE, HOST)
SCORE_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class FreezeSettings:
    """What a user chooses; the ``[freezing]`` section of the configuration explains each value.

    Attributes:
        phases: Last steps of warm-up, monitoring and ramp.
        max_freeze_ratio: r_max in [0, 1], for all stages or one value for each.
        seed: Seed of the masks, at least 0.
        first_stage: One of ``FIRST_STAGE_MODES``.
        cascade: What to do about backwards that nobody needs (:mod:`timelyfreeze.planning.skipped_grads`), one of
            ``CASCADES``: run them, leave them out, or plan for them too. Only where the first stage
            is frozen all or nothing; a chain that is kept needs all of them.
        discard_passes: Passes left out of all measurements after each change of phase.
        solver_time_limit_s: Seconds after which the solver gives up.
        solver_delay_steps: Steps that training goes on while the plan is solved; None to let the
            size of the pipeline decide.
        remeasure_every: Steps of the stable phase after which times are compared with the plan's,
            again and again; 0 for never.
        remeasure_share: Share by which times must have moved for the plan to be solved anew.
        least_gain: Throughput, as a fraction, that freezing must bring to stay switched on.
        score_memory: Where policies' vectors live, one of ``SCORE_MEMORIES``.
        score_dtype: What they are kept in, one of ``SCORE_DTYPES``.

    Raises:
        ValueError: If a word is unknown or a number makes no sense.
    """

    phases: PhaseSchedule
    max_freeze_ratio: float | tuple[float, ...] = 0.8
    seed: int = 42
    first_stage: str = ALL_OR_NOTHING
    cascade: str = USE
    discard_passes: int = 2
    solver_time_limit_s: float = 60.0
    solver_delay_steps: int | None = None
    remeasure_every: int = 100
    remeasure_share: float = 0.1
    least_gain: float = 0.02
    score_memory: str = DEVICE
    score_dtype: str = SCORE_DTYPES[0]

    def __post_init__(self) -> None:
        """Refuse unknown words, and numbers that leave planning no room."""
        mistakes = [
            *unknown_words(
                first_stage=self.first_stage,
                cascade=self.cascade,
                score_memory=self.score_memory,
                score_dtype=self.score_dtype,
            ),
            *replanning_mistakes(
                phases=self.phases,
                solver_delay_steps=self.solver_delay_steps,
                remeasure_every=self.remeasure_every,
                remeasure_share=self.remeasure_share,
                least_gain=self.least_gain,
            ),
        ]
        if mistakes:
            raise ValueError("; ".join(mistakes))


def effective_cascade(first_stage: str, cascade: str) -> str:
    """Return the cascade that a first stage of the given kind allows."""
    return cascade if first_stage == ALL_OR_NOTHING else OFF


def unknown_words(**words: str) -> Iterator[str]:
    """Yield what is wrong with settings that have a fixed choice of words.

    Args:
        **words: Some of ``first_stage``, ``cascade``, ``score_memory`` and ``score_dtype``.
    """
    known = {
        "first_stage": FIRST_STAGE_MODES,
        "cascade": CASCADES,
        "score_memory": SCORE_MEMORIES,
        "score_dtype": SCORE_DTYPES,
    }
    for key, word in words.items():
        if word not in known[key]:
            yield f"freezing.{key} is {word!r}; known: {', '.join(known[key])}"


def replanning_mistakes(
    *,
    phases: PhaseSchedule,
    solver_delay_steps: int | None,
    remeasure_every: int,
    remeasure_share: float,
    least_gain: float,
) -> Iterator[str]:
    """Yield what is wrong with the numbers that say when a plan is made, made anew or given up."""
    n_ramp_steps = phases.last_ramp_step - phases.last_monitor_step
    delay = 0 if solver_delay_steps is None or not phases.measures else solver_delay_steps
    if delay < 0 or delay >= max(1, n_ramp_steps):
        yield (
            f"freezing.solver_delay_steps is {delay}; it must be 0 or more and below the "
            f"{n_ramp_steps} steps of the ramp (freezing.last_monitor_step to "
            "freezing.last_ramp_step)"
        )
    if remeasure_every < 0:
        yield f"freezing.remeasure_every is {remeasure_every}; it must be 0 (never) or more"
    if not (math.isfinite(remeasure_share) and remeasure_share > 0.0):
        yield f"freezing.remeasure_share is {remeasure_share}; it must be above 0 and finite"
    if not (math.isfinite(least_gain) and least_gain >= -1.0):
        yield (
            f"freezing.least_gain is {least_gain}; it must be -1 (freezing is never switched off) "
            "or more, and finite"
        )
