"""Which examples of instruction data are trained on, and which are held out for validation."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.rows.errors import DataError

# Not a setting: runs that differ in their seeds are compared on the same examples.
_SPLIT_SEED = 0


def fraction_error(validation_fraction: float) -> str | None:
    """Return what is wrong with ``data.validation_fraction``, or None."""
    if 0.0 <= validation_fraction < 1.0:
        return None
    return f"data.validation_fraction is {validation_fraction}; it must lie in [0, 1)"


@dataclass(frozen=True)
class ExampleSplit:
    """One of the two parts of a data set.

    Which examples are held out depends on the number of examples and the fraction alone. Those of a
    smaller fraction are among those of a larger one.

    Attributes:
        validation_fraction: Fraction of the examples that is held out, in [0, 1); rounded to whole
            examples.
        held_out: Whether this is the held-out part, not the one to train on.

    Raises:
        ValueError: If the fraction is outside its range.
    """

    validation_fraction: float = 0.0
    held_out: bool = False

    def __post_init__(self) -> None:
        """Refuse a fraction that is none."""
        if message := fraction_error(self.validation_fraction):
            raise ValueError(message)

    def indices(self, n_examples: int) -> NDArray[np.int64]:
        """Return the examples of this part, int64.

        Those to train on come in the order of the data set, those held out in a random one, so that
        any first few of them are a fair sample.

        Raises:
            DataError: If no example is left to train on.
        """
        n_held_out = round(self.validation_fraction * n_examples)
        if not n_held_out:
            return np.arange(0 if self.held_out else n_examples, dtype=np.int64)
        if n_held_out == n_examples:
            raise DataError(
                f"data.validation_fraction is {self.validation_fraction}, which holds out all of "
                f"{n_examples} examples; lower it, or use more data"
            )
        order = np.random.default_rng(_SPLIT_SEED).permutation(n_examples)
        return order[:n_held_out] if self.held_out else np.sort(order[n_held_out:])


ALL_EXAMPLES = ExampleSplit()
