"""Question and answer: a grid of schedules, caps, microbatches and splits."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Generic, TypeVar

from timelyfreeze.planning import gain_of
from timelyfreeze.records.convergence import kappa_of_cap
from timelyfreeze.settings import ALL_OR_NOTHING, USE

# Number of layers of each stage.
Split = tuple[int, ...]

DEFAULT_SPLIT = "default"
BEST_SPLIT = "balanced"


def render_split(split: Sequence[int]) -> str:
    """Return a split as text, such as "9,8,8,7"."""
    return ",".join(map(str, split))


def layers_of_split(split: Sequence[int]) -> list[range]:
    """Return the layers of stages, from their numbers."""
    return [range(end - n, end) for n, end in zip(split, accumulate(split), strict=True)]


def render_cap(cap: float | str) -> str:
    """Return a value of r_max as text, such as "0.8" or "auto"."""
    return cap if isinstance(cap, str) else f"{cap:g}"


def fewest_layers(n_stages: int) -> Split:
    """Return the fewest layers of 2 stages or more: embedding and head make a stage, too."""
    return (0, *[1] * (n_stages - 2), 0)


def default_split(n_layers: int, n_stages: int) -> Split:
    """Return TorchTitan's default cut of a model.

    Embedding and head count as layers; a remainder goes to the stages in front.
    """
    n_units = n_layers + 2
    if not 2 <= n_stages <= n_units:
        raise ValueError(f"{n_layers} layers cannot be cut into {n_stages} stages")
    units = [n_units // n_stages + (stage < n_units % n_stages) for stage in range(n_stages)]
    units[0] -= 1
    units[-1] -= 1
    return tuple(units)


@dataclass(frozen=True)
class Grid:
    """A question: every combination of the first four fields."""

    schedules: tuple[str, ...]  # names of schedules
    caps: tuple[float | str, ...]  # values of r_max, in [0, 1], or ``settings.AUTO``
    # Numbers of microbatches; a microbatch stays as large as it was measured.
    microbatches: tuple[int, ...]
    # ``DEFAULT_SPLIT`` (as measured, or TorchTitan's cut where the number of stages is another),
    # ``BEST_SPLIT`` (fastest without freezing), one of ``partition.PARTITIONS`` (the largest rank
    # has least of it), or layers of each stage.
    splits: tuple[str | Split, ...]
    n_ranks: int  # pipeline ranks
    # How the first stage is frozen, one of ``settings.FIRST_STAGE_MODES``.
    first_stage: str = ALL_OR_NOTHING
    # What is done about input gradients that nobody needs, one of ``settings.SKIP_INPUT_GRADS``.
    skip_input_grads: str = USE
    # How many ranks compute at once; None if each has a device of its own.
    n_processors: float | None = None
    p2p_overhead_ms: float = 0.0  # overhead of a message, added to what the bounds have of it
    # Bandwidth of the link between two replicas, 10^9 bytes a second; None if gradients that they
    # send each other are left out.
    link_gb_per_s: float | None = None
    batches: int = 1  # pipeline batches in an optimizer step
    outside_ms: float = 0.0  # time of a step outside of its batches: optimizer, clipping, data
    time_limit_s: float = 60.0  # limit on the solver's time for a case, seconds

    def step_ms(self, batch_ms: float) -> float:
        """Return the time of a step of batches of ``batch_ms``."""
        return self.batches * batch_ms + self.outside_ms


@dataclass(frozen=True)
class Case:
    """A combination of the grid and its results."""

    schedule: str  # name of the schedule
    n_microbatches: int  # microbatches of a batch
    batches: int  # batches of a step
    max_freeze_ratio: float | str  # the cap r_max, or ``settings.AUTO``
    # Directions in which frozen weights still learn; None where the file does not tell.
    gradient_rank: int | None
    split: str  # its name, as asked for
    layers: Split | None  # layers of each stage; None where the file does not tell
    step_ms: float  # step without freezing, milliseconds
    frozen_step_ms: float  # step under the plan
    all_frozen_step_ms: float  # step with everything frozen; no plan is faster
    steps_factor: float | None  # steps to a loss over those without freezing, estimated
    mean_ratio: float  # mean planned ratio over all backwards
    stage_ratios: tuple[float, ...]  # mean planned ratio of each stage's backwards
    # Fraction of the batch in which the ranks' devices, or the processors that they share, have
    # nothing to run, nothing frozen.
    bubble: float
    frozen_bubble: float  # the same under the plan
    # Split that is fastest without freezing; None where layers are not known.
    best_unfrozen_layers: Split | None
    best_unfrozen_step_ms: float | None  # step of that split
    # Under the plan, per device; None where the file does not tell the tokens of a microbatch.
    tokens_per_second: float | None

    # -- what follows from these
    gain: float = field(init=False)  # throughput gained over no freezing, as a fraction
    time_to_loss: float | None = field(init=False)  # over that without freezing, estimated
    # Step under the plan over that without freezing (Eq. 12); None for a step of 0 ms.
    kappa: float | None = field(init=False)
    # The same as Eq. 50 estimates it from the cap alone; None where the cap is chosen.
    kappa_of_cap: float | None = field(init=False)
    upper_bound_gain: float = field(init=False)  # throughput gained if everything were frozen
    gain_over_best_unfrozen: float | None = field(init=False)  # over the best split's
    # Step under the plan over its microbatches, to compare numbers of those.
    frozen_microbatch_ms: float = field(init=False)
    tokens_per_second_unfrozen: float | None = field(init=False)  # of a device without freezing

    def __post_init__(self) -> None:
        """Compute derived fields."""
        step_ms, frozen_ms, best_ms = self.step_ms, self.frozen_step_ms, self.best_unfrozen_step_ms
        cap, factor, rate = self.max_freeze_ratio, self.steps_factor, self.tokens_per_second
        kappa = frozen_ms / step_ms if step_ms > 0.0 else None
        by_cap = None
        if kappa is not None and not isinstance(cap, str):
            by_cap = kappa_of_cap(cap, self.all_frozen_step_ms, step_ms)
        found = {
            "gain": gain_of(step_ms, frozen_ms),
            "time_to_loss": None if kappa is None or factor is None else kappa * factor,
            "kappa": kappa,
            "kappa_of_cap": by_cap,
            "upper_bound_gain": gain_of(step_ms, self.all_frozen_step_ms),
            "gain_over_best_unfrozen": None if best_ms is None else gain_of(best_ms, frozen_ms),
            "frozen_microbatch_ms": self.per_microbatch(frozen_ms),
            "tokens_per_second_unfrozen": None if rate is None else rate * frozen_ms / step_ms,
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)

    def per_microbatch(self, step_ms: float) -> float:
        """Return the time of a step over its microbatches."""
        return step_ms / (self.batches * self.n_microbatches)


T = TypeVar("T")


@dataclass(frozen=True)
class Answer(Generic[T]):
    """The cases of a grid."""

    cases: tuple[T, ...]  # in the order of the grid
    notes: tuple[str, ...]  # what was left out and why, and what the metrics rest on
