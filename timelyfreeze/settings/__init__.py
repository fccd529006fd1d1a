"""Choices of a user: phases of a run, and the settings of freezing."""

from timelyfreeze.settings.freezing import (
    ALL_OR_NOTHING,
    AUTO,
    FIRST_STAGE_MODES,
    HOST,
    OFF,
    PER_TENSOR,
    SKIP_INPUT_GRADS,
    USE,
    FreezeSettings,
    auto_rank,
    first_stage_mode,
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
from timelyfreeze.settings.names import (
    AtLeast0,
    AtLeast1,
    arguments_named,
    begin_anew,
    key,
    name_arguments,
    rule_errors,
)
from timelyfreeze.settings.phases import FREEZING_PHASES, IDLE_PHASES, Phase, PhaseSchedule, Step
