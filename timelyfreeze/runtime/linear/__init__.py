"""The linear layers of a stage: groups of a common input, 16-bit copies of weights, gradients.

The weight gradient of a linear layer is dW = dY^T X, shape [d_out, d_in], and costs N d_out d_in
for N tokens. A frozen layer leaves out the product. With Q, an orthonormal basis of k directions of
the layer's shorter side, the part of dW in Q costs k (1 / d_in + 1 / d_out) of the whole: dY^T (X
Q) Q^T, or Q (dY Q)^T X.
"""

from timelyfreeze.runtime.linear.adapters import PLACE as ADAPTER_PLACE
from timelyfreeze.runtime.linear.adapters import Adapter
from timelyfreeze.runtime.linear.groups import LinearGroup, stage_parameters
from timelyfreeze.runtime.linear.layers import StageLinear, joined_output
from timelyfreeze.runtime.linear.stage_linears import (
    StageLinears,
    is_compiled_in_place,
    keep_copies,
    lean_linears,
    linears_of,
    plain_linears,
)
