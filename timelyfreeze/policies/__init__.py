"""Rules by which tensors are frozen in the course of training: a file for each method.

Importing this package registers all methods below.
"""

from timelyfreeze.policies import (
    apf,
    autofreeze,
    egeria,
    fixed,
    linear,
    lisa,
    pipetransformer,
    smartpipe,
)
from timelyfreeze.policies.layout import ModelLayout, build_layout
from timelyfreeze.policies.methods import chosen_policy, freezes_by_turns, makes_plan, parse_method
from timelyfreeze.policies.policy import (
    LORA,
    NONE,
    PLANNED,
    Check,
    Compared,
    ComparesOutputs,
    Decision,
    Difference,
    Evaluation,
    FreezePolicy,
    Measurement,
    Metric,
    Observed,
    ReferenceSettings,
    Source,
    freezes_whole_layers,
    register_policy,
    registered_policies,
    together,
)
from timelyfreeze.policies.selection import (
    FreezeUnits,
    ParameterTable,
    build_parameter_table,
    build_units,
    draw_uniform,
    draw_whether,
    fit_to_ratio,
    fit_whole_stage,
    mask_rng,
)
