"""What Egeria's rule remembers from check to check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from timelyfreeze.policies.plasticity import History, history_from_plain


@dataclass(frozen=True)
class EgeriaState:
    """Where Algorithm 1 stands.

    Attributes:
        window: W as it is now.
        stale: S as it is now.
        step: Optimizer step of the last check.
        front: Number of the frontmost live module, l.
        is_guided: Whether bootstrapping has ended.
        loss: Mean loss of the interval before; None before there was one.
        frozen_rate: Learning rate when module 0 was frozen; None while it is live or unknown.
        copy: Number of the copy that l is compared with.
        copy_age: Evaluations with it.
        dropped: Comparisons that were left out so far.
        history: Plasticity of l.
    """

    window: int
    stale: int
    step: int = 0
    front: int = 0
    is_guided: bool = False
    loss: float | None = None
    frozen_rate: float | None = None
    copy: int = 0
    copy_age: int = 0
    dropped: int = 0
    history: History = field(default_factory=History)

    def renewed(self, **changes: Any) -> EgeriaState:
        """Return the state with a new copy, and whatever else changes."""
        return replace(self, copy=self.copy + 1, copy_age=0, **changes)

    def unfrozen(self) -> EgeriaState:
        """Return the state with everything live and half the patience: S 1 and W 2 at least."""
        return self.renewed(
            front=0,
            frozen_rate=None,
            window=max(2, self.window // 2),
            stale=max(1, self.stale // 2),
            history=History(),
        )

    def to_plain(self) -> dict[str, Any]:
        """Return it as numbers and lists."""
        return {**vars(self), "history": self.history.to_plain()}


def state_from_plain(plain: Mapping[str, Any]) -> EgeriaState:
    """Return what :meth:`EgeriaState.to_plain` was called of."""
    return EgeriaState(**{**plain, "history": history_from_plain(plain["history"])})
