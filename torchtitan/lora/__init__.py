"""Adapters of low rank (arXiv:2106.09685) beside frozen linear layers: the section ``[lora]``."""

from dataclasses import dataclass, field

# What people multiply a learning rate for all weights by.
_FASTER = 10.0


@dataclass
class Lora:
    """Adapters, which learn in place of the weights with freezing.method "lora"."""

    rank: int = 16
    """Width of an adapter."""

    alpha: float | None = None
    """What an adapter adds is multiplied by alpha / rank. Unset: twice the rank, as is usual."""

    targets: list[str] = field(default_factory=list)
    """Linear layers that get an adapter, by the last words of their names: "wq", "attention.wq" or
    "layers.3.attention.wq". Unset: all but the head."""

    learning_rate: float | None = None
    """Of the adapters, instead of optimizer.lr. Unset: ten times that one, since adapters learn
    slower than weights."""

    until: int = 0
    """Last step of adapters that learn first and are then merged. All weights go on by
    freezing.method, phases counted from there: see docs/low_rank.md. 0: none learn first."""

    @property
    def scale(self) -> float:
        """Factor of an adapter's output."""
        alpha = 2.0 * self.rank if self.alpha is None else self.alpha
        return alpha / self.rank

    def rate(self, of_weights: float) -> float:
        """Return the learning rate of adapters, given the weights'."""
        return _FASTER * of_weights if self.learning_rate is None else self.learning_rate
