"""What a user chooses: phases of a run, and the settings of freezing."""

from timelyfreeze.settings.choices import (
    ALL_OR_NOTHING,
    AUTO,
    FIRST_STAGE_MODES,
    HOST,
    OFF,
    PER_TENSOR,
    SKIP_INPUT_GRADS,
    USE,
    FreezeSettings,
    delay_errors,
    first_stage_mode,
    rank_errors,
    ratio_errors,
    skips_input_grads,
)
from timelyfreeze.settings.front import (
    GIB,
    ActivationCache,
    CacheSettings,
    ElasticSettings,
    PackingSettings,
)
from timelyfreeze.settings.names import arguments_named, begin_anew, key, name_arguments
from timelyfreeze.settings.phases import (
    FREEZING_PHASES,
    MIXED,
    Phase,
    PhaseSchedule,
    actual_freeze_ratio,
)
from timelyfreeze.settings.rules import AtLeast0, AtLeast1, rule_errors
