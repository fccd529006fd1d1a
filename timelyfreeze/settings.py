"""What a user chooses about freezing, as the library takes it."""

from __future__ import annotations

from dataclasses import dataclass

from timelyfreeze.phases import PhaseSchedule

ALL_OR_NOTHING = "all_or_nothing"
KEEP_CHAIN = "keep_chain"
FIRST_STAGE_MODES = (ALL_OR_NOTHING, KEEP_CHAIN)


@dataclass(frozen=True)
class FreezeSettings:
    """What a user chooses; the ``[freezing]`` section of the configuration explains each value.

    Attributes:
        phases: Last steps of warm-up, monitoring and ramp.
        max_freeze_ratio: r_max in [0, 1], for all stages or one value for each.
        seed: Seed of the masks, at least 0.
        first_stage: One of ``FIRST_STAGE_MODES``.
        discard_passes: Passes left out of all measurements after each change of phase.
        solver_time_limit_s: Seconds after which the solver gives up.

    Raises:
        ValueError: If ``first_stage`` is unknown.
    """

    phases: PhaseSchedule
    max_freeze_ratio: float | tuple[float, ...] = 0.8
    seed: int = 42
    first_stage: str = ALL_OR_NOTHING
    discard_passes: int = 2
    solver_time_limit_s: float = 60.0

    def __post_init__(self) -> None:
        """Refuse an unknown mode of the first stage."""
        if self.first_stage not in FIRST_STAGE_MODES:
            raise ValueError(
                f"freezing.first_stage is {self.first_stage!r}; "
                f"known: {', '.join(FIRST_STAGE_MODES)}"
            )
