"""Which tensors to freeze, by rules that watch the training: a file for each method.

Importing this package registers all methods below.
"""

from timelyfreeze.policies import (
    apf,
    autofreeze,
    fixed,
    linear,
    lisa,
    pipetransformer,
    smartpipe,
)
from timelyfreeze.policies.layout import ModelLayout, build_layout
from timelyfreeze.policies.methods import parse_method
from timelyfreeze.policies.policy import (
    NONE,
    Check,
    Decision,
    FreezePolicy,
    Measurement,
    Metric,
    Source,
    freezes_whole_layers,
    registered_policies,
)

__all__ = [
    "NONE",
    "Check",
    "Decision",
    "FreezePolicy",
    "Measurement",
    "Metric",
    "ModelLayout",
    "Source",
    "apf",
    "autofreeze",
    "build_layout",
    "fixed",
    "freezes_whole_layers",
    "linear",
    "lisa",
    "parse_method",
    "pipetransformer",
    "registered_policies",
    "smartpipe",
]
