"""Gradients that frozen linear layers get in a small subspace, instead of none.

The weight gradient of a linear layer is dW = dY^T X, shape [d_out, d_in], and costs N d_out d_in
for N tokens. With Q, an orthonormal basis of k directions of the layer's shorter side, its part
that lies in Q costs k (1 / d_in + 1 / d_out) of that: dY^T (X Q) Q^T, or Q (dY Q)^T X.
"""

from timelyfreeze.runtime.low_rank.layers import LowRankLayers
from timelyfreeze.runtime.low_rank.subspace import energies, first_basis, next_basis
from timelyfreeze.runtime.low_rank.subspaces import Subspaces
