"""Subspaces in which frozen linear layers still get a gradient: their begin, turns, and saving."""

from timelyfreeze.runtime.low_rank.subspace import first_basis
from timelyfreeze.runtime.low_rank.subspaces import Subspaces
