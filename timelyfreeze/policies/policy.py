"""Policies: rules for the frozen tensors of the whole model, decided from time to time.

A policy sees numbers and answers with a decision; both are plain frozen values, so every rule can
be checked by hand. Policies know neither stages nor processes: measurements are asked for as data,
and made elsewhere (``timelyfreeze.runtime``), exchanges and applies
(``timelyfreeze.control.policy_runner``). Notation: n tensors.

To add a method, write a frozen dataclass with the members of :class:`FreezePolicy`, registered in a
file of ``timelyfreeze/policies/``, in a user's program, or in a distribution with an entry point of
the group ``timelyfreeze.policies``. Its fields become the section ``[freezing.<name>]`` of the
configuration, the strings under them the help texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.policies.layout import ModelLayout
from timelyfreeze.settings import rule_errors

BACKGROUND = "background"
INLINE = "inline"
INT8 = "int8"
FLOAT32 = "float32"


@dataclass(frozen=True)
class ReferenceSettings:
    """How a reference is made and run."""

    # ``BACKGROUND``, in a process of its own that nobody waits for, or ``INLINE``, in the training
    # process, which then waits
    place: str = BACKGROUND
    precision: str = INT8  # what its linear layers compute in, ``INT8`` or ``FLOAT32``
    max_tokens: int = 256  # tokens of an output that are compared, at most; 0 to compare examples
    squared: bool = False  # as in :func:`timelyfreeze.policies.plasticity.similarity_loss`
    queue_length: int = 2  # comparisons that may wait for a process; more are dropped
    max_cpu_load: float = 0.5  # load average per core above which no comparison is begun


@dataclass(frozen=True)
class Compared:
    """Blocks to be compared until the next check."""

    first: int  # their first layer
    end: int  # the layer behind their last
    copy: int  # number of the copy; a new number asks for one of the weights as they are now


@dataclass(frozen=True, order=True)
class Difference:
    """Finding of a comparison."""

    step: int  # step whose batch went through both
    first: int  # first layer of the blocks
    value: float  # plasticity


@dataclass(frozen=True)
class Evaluation:
    """Result of a comparison in a decision."""

    step: int  # step whose batch went through both
    module: int  # number of the part of the model, from the front
    value: float  # plasticity
    smoothed: float  # its moving mean


@dataclass(frozen=True)
class Observed:
    """Observations of a rank, or of all together, since the check before."""

    loss: float | None  # mean over the steps that count; None if nobody has seen one
    learning_rate: float | None  # of the step of the check; None if nobody knows it
    # what comparisons have found, oldest first. One may arrive checks later
    differences: tuple[Difference, ...] = ()
    dropped: int = 0  # comparisons that were left out: no room, a busy machine, a process that died


def together(ranks: Sequence[Observed]) -> Observed:
    """Join the ranks' observations: the mean of all losses."""
    losses = [rank.loss for rank in ranks if rank.loss is not None]
    rates = [rank.learning_rate for rank in ranks if rank.learning_rate is not None]
    return Observed(
        sum(losses) / len(losses) if losses else None,
        rates[0] if rates else None,
        tuple(sorted(found for rank in ranks for found in rank.differences)),
        sum(rank.dropped for rank in ranks),
    )


@runtime_checkable
class ComparesOutputs(Protocol):
    """A policy with comparisons: its checks have ``Check.observed``."""

    @property
    def reference_settings(self) -> ReferenceSettings:
        """How the reference is made and run."""

    def compared(self, decision: Decision, layout: ModelLayout) -> Compared | None:
        """Return the blocks to compare until the next check, or None."""


NONE = "none"
LORA = "lora"
PLANNED = "timelyfreeze"
ENTRY_POINTS = "timelyfreeze.policies"

_PolicyClass = TypeVar("_PolicyClass", bound=type)


class Source(Enum):
    """Source of Delta, the change from check to check."""

    UPDATES = "updates"  # how far the weights have moved
    GRADIENTS = "gradients"  # the sum of the steps' gradients
    LAST_GRADIENT = "last gradient"  # the gradient of the step that ends the interval


class Metric(Enum):
    """A number taken from a tensor's change Delta_K at check K."""

    SQUARE_SUM = "square_sum"  # sum of Delta_K^2, so its root is the norm
    SUM = "sum"  # sum of Delta_K, so that opposite moves cancel
    ABS_SUM = "abs_sum"  # sum of |Delta_K|
    MEAN_ABS_SUM = "mean_abs_sum"  # sum of |E_K|, E_K = alpha E_{K-1} + (1 - alpha) Delta_K
    # Number of elements with |E_K| <= T times such a mean of |Delta_K|, once and for all: their
    # means stay, as those of elements that are frozen.
    SETTLED = "settled"
    DIFFERENCE_SQUARE_SUM = "difference_square_sum"  # sum of (Delta_K - Delta_{K-1})^2


@dataclass(frozen=True)
class Measurement:
    """Measurements of a policy at checks."""

    source: Source  # which change is watched
    metrics: tuple[Metric, ...]  # which numbers are taken of it
    decay: float = 0.0  # alpha of the running means, [0, 1), for ``MEAN_ABS_SUM`` or ``SETTLED``
    threshold: float = 0.0  # T in [0, 1], for ``SETTLED``


@dataclass(frozen=True, eq=False)
class Check:
    """Input of a policy at a check."""

    number: int  # K: 0 for the start, before the first step that may freeze; then 1, 2, ...
    layout: ModelLayout  # the n tensors of the model
    # one float64 number per tensor, shape [n], for each wanted metric; empty at the start. A tensor
    # that was frozen all the time has not changed: its ``ABS_SUM`` is 0
    metrics: Mapping[Metric, NDArray[np.float64]]
    seed: int  # for policies that draw: the same on every rank and after a resume
    # losses, learning rate and comparisons, for a policy that compares outputs
    # (:class:`ComparesOutputs`); None at the start
    observed: Observed | None = None
    step: int = 0  # optimizer step that has just ended; 0 at the start


@dataclass(frozen=True, eq=False)
class Decision:
    """Answer of a policy."""

    frozen: NDArray[np.bool_]  # tensors to freeze until the next check, bool, shape [n]
    # what the rule wants to see again at the next check; numbers and lists of numbers only, because
    # it goes into checkpoints as JSON
    memory: Mapping[str, Any] = field(default_factory=dict)
    # numbers worth a curve, by name. ``frozen_layers`` says that the policy freezes from the front,
    # and how many blocks
    metrics: Mapping[str, float] = field(default_factory=dict)
    # comparisons that it took into account, for whoever draws them; they are in no checkpoint
    evaluations: tuple[Evaluation, ...] = ()


class FreezePolicy(Protocol):
    """A freezing method: a frozen dataclass of its settings, with a rule.

    Every rank calls the rule with the same values and must get the same answer, so only arguments
    and settings may count.
    """

    @property
    def check_interval(self) -> int:
        """Steps between checks; steps without changes of weights are not counted."""

    @property
    def measurement(self) -> Measurement | None:
        """The measurement, or None for a rule without numbers."""
        return None

    def errors(self) -> Iterator[str]:
        """Yield errors of the settings: key, value and rule; here by their types."""
        name = next((name for name, kind in _POLICIES.items() if kind is type(self)), "")
        yield from rule_errors(self, name)

    def start(self, check: Check) -> Decision:
        """Decide before the first step with freezing; raise ValueError for an unfit model."""

    def decide(self, before: Decision, check: Check) -> Decision:
        """Decide at a check, given the decision before."""


_POLICIES: dict[str, type] = {}
_BY_LAYERS: set[str] = set()


def register_policy(
    name: str, *, whole_layers: bool = False
) -> Callable[[_PolicyClass], _PolicyClass]:
    """Make a policy class selectable as ``method = "<name>"``.

    The name becomes a section of the configuration. ``whole_layers``: decisions freeze all tensors
    of a transformer block or none; only then may blocks be compiled. ValueError if the name is
    taken or unfit, or the class is not a dataclass.
    """

    def register(policy_class: _PolicyClass) -> _PolicyClass:
        if name in (NONE, LORA, PLANNED):
            raise ValueError(f"no policy can be named {name!r}; that method is no policy")
        if name in _POLICIES:
            raise ValueError(
                f"the policy {name!r} is registered twice: {_POLICIES[name].__name__} and "
                f"{policy_class.__name__}"
            )
        if not name.isidentifier():
            raise ValueError(f"a policy is named {name!r}; use letters, digits and underscores")
        if not is_dataclass(policy_class):
            raise ValueError(f"{policy_class.__name__} is not a dataclass; its fields are settings")
        _POLICIES[name] = policy_class
        if whole_layers:
            _BY_LAYERS.add(name)
        return policy_class

    return register


def registered_policies() -> dict[str, type]:
    """Return every known policy class by name; ValueError if somebody's entry point is broken."""
    _load_entry_points()
    return dict(_POLICIES)


@cache
def _load_entry_points() -> None:
    """Load other distributions' policies of the group ``timelyfreeze.policies``, once."""
    for point in entry_points(group=ENTRY_POINTS):
        before = len(_POLICIES)
        named = f"the entry point {point.name!r} ({point.value}) of {ENTRY_POINTS!r}"
        named += f" in {point.dist.name} {point.dist.version}" if point.dist is not None else ""
        try:
            loaded = point.load()
        except Exception as error:  # whatever somebody else's module may raise
            raise ValueError(
                f"{named} cannot be loaded: {type(error).__name__}: {error}; repair or remove that "
                "distribution"
            ) from error
        if len(_POLICIES) == before and loaded not in _POLICIES.values():
            raise ValueError(f"{named} registers no policy; decorate it with register_policy")


def freezes_whole_layers(name: str) -> bool:
    """Return whether a registered policy never freezes a part of a transformer block."""
    return name in _BY_LAYERS
