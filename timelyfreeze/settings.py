"""What a user chooses about freezing, as the library takes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from timelyfreeze.phases import PhaseSchedule

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
        cascade: What to do about backwards that nobody needs (:mod:`timelyfreeze.cascade`), one of
            ``CASCADES``: run them, leave them out, or plan for them too. Only where the first stage
            is frozen all or nothing; a chain that is kept needs all of them.
        discard_passes: Passes left out of all measurements after each change of phase.
        solver_time_limit_s: Seconds after which the solver gives up.
        score_memory: Where policies' vectors live, one of ``SCORE_MEMORIES``.
        score_dtype: What they are kept in, one of ``SCORE_DTYPES``.

    Raises:
        ValueError: If a word is unknown.
    """

    phases: PhaseSchedule
    max_freeze_ratio: float | tuple[float, ...] = 0.8
    seed: int = 42
    first_stage: str = ALL_OR_NOTHING
    cascade: str = USE
    discard_passes: int = 2
    solver_time_limit_s: float = 60.0
    score_memory: str = DEVICE
    score_dtype: str = SCORE_DTYPES[0]

    def __post_init__(self) -> None:
        """Refuse unknown words."""
        mistakes = list(
            unknown_words(
                first_stage=self.first_stage,
                cascade=self.cascade,
                score_memory=self.score_memory,
                score_dtype=self.score_dtype,
            )
        )
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
