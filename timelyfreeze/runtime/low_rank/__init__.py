"""The subspaces in which frozen linear layers still get a gradient: how they begin, turn, save."""

from timelyfreeze.runtime.low_rank.subspace import energies, first_basis, next_basis
from timelyfreeze.runtime.low_rank.subspaces import Subspaces
