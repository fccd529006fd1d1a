"""What a user chooses: phases of a run, and the settings of freezing."""

from timelyfreeze.settings.choices import (
    ALL_OR_NOTHING,
    AUTO,
    FIRST_STAGE_MODES,
    GIB,
    HOST,
    OFF,
    PER_TENSOR,
    SKIP_INPUT_GRADS,
    USE,
    ActivationCache,
    CacheSettings,
    ElasticSettings,
    FreezeSettings,
    PackingSettings,
    delay_errors,
    first_stage_mode,
    rank_errors,
    ratio_errors,
    skips_input_grads,
)
from timelyfreeze.settings.names import (
    AtLeast0,
    AtLeast1,
    arguments_named,
    begin_anew,
    key,
    name_arguments,
    rule_errors,
)
from timelyfreeze.settings.phases import FREEZING_PHASES, MIXED, Phase, PhaseSchedule
