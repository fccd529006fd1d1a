"""What a user chooses: phases of a run, and the settings of freezing."""

from timelyfreeze.settings.choices import (
    ALL_OR_NOTHING,
    FIRST_STAGE_MODES,
    HOST,
    OFF,
    PER_TENSOR,
    PLAN,
    SKIP_INPUT_GRADS,
    USE,
    FreezeSettings,
    effective_skip_input_grads,
    replanning_errors,
    unknown_words,
)
from timelyfreeze.settings.phases import (
    FREEZING_PHASES,
    MIXED,
    Phase,
    PhaseSchedule,
    actual_freeze_ratio,
)

__all__ = [
    "ALL_OR_NOTHING",
    "FIRST_STAGE_MODES",
    "FREEZING_PHASES",
    "HOST",
    "MIXED",
    "OFF",
    "PER_TENSOR",
    "PLAN",
    "SKIP_INPUT_GRADS",
    "USE",
    "FreezeSettings",
    "Phase",
    "PhaseSchedule",
    "actual_freeze_ratio",
    "effective_skip_input_grads",
    "replanning_errors",
    "unknown_words",
]
