"""What a user chooses about freezing, as the library takes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from timelyfreeze.files import OneOf, Within
from timelyfreeze.settings.names import key
from timelyfreeze.settings.phases import PhaseSchedule
from timelyfreeze.settings.rules import AtLeast0, rule_errors

ALL_OR_NOTHING = "all_or_nothing"
PER_TENSOR = "per_tensor"
FIRST_STAGE_MODES = (ALL_OR_NOTHING, PER_TENSOR)

AUTO = "auto"

OFF = "off"
USE = "use"
SKIP_INPUT_GRADS = (OFF, USE)

DEVICE = "device"
HOST = "host"


@dataclass(frozen=True)
class FreezeSettings:
    """What a user chooses; ``docs/library.md`` explains each value.

    Most are arguments of :class:`timelyfreeze.TimelyFreeze`, which says what they mean.
    """

    phases: PhaseSchedule
    max_freeze_ratio: float | tuple[float, ...] | str = AUTO
    gradient_rank: int = 0
    seed: Annotated[int, Within(0, 2**64, below=True)] = 42
    first_stage: Annotated[str, OneOf(*FIRST_STAGE_MODES)] = ALL_OR_NOTHING
    skip_input_grads: Annotated[str, OneOf(*SKIP_INPUT_GRADS)] = USE
    discard_batches: int = 2
    solver_time_limit_s: float = 60.0
    solver_delay_steps: int | None = None
    replan_every: AtLeast0 = 100
    replan_threshold: Annotated[float, Within(0.0, above=True)] = 0.1
    min_gain: Annotated[float, Within(-1.0)] = 0.02
    score_memory: Annotated[str, OneOf(DEVICE, HOST)] = DEVICE
    score_dtype: Annotated[str, OneOf("float32", "bfloat16")] = "float32"

    def __post_init__(self) -> None:
        """Refuse unknown words, and numbers that leave planning no room."""
        errors = [
            *rule_errors(self),
            *delay_errors(self.phases, self.solver_delay_steps),
            *rank_errors(self.gradient_rank),
        ]
        if errors:
            raise ValueError("; ".join(errors))

    def compares_times(self, step: int) -> bool:
        """Return whether ``step`` is one after which times are compared with the plan's."""
        last_ramp = self.phases.last_ramp_step
        is_stable = self.replan_every > 0 and step > last_ramp
        return is_stable and (step - last_ramp) % self.replan_every == 0

    @property
    def freezes_first_stage_whole(self) -> bool:
        """Whether the first stage is frozen all or nothing."""
        return first_stage_mode(self.first_stage, self.gradient_rank) == ALL_OR_NOTHING

    @property
    def skips_input_grads(self) -> bool:
        """Whether backwards that nobody needs are left out."""
        mode = first_stage_mode(self.first_stage, self.gradient_rank)
        return skips_input_grads(mode, self.skip_input_grads)


def rank_errors(gradient_rank: int) -> Iterator[str]:
    """Yield what is wrong with the rank of gradients."""
    name = key("gradient_rank")
    if not isinstance(gradient_rank, int) or isinstance(gradient_rank, bool) or gradient_rank < 0:
        yield f"{name} is {gradient_rank!r}; it must be a whole number, 0 or more"


def first_stage_mode(first_stage: str, gradient_rank: int) -> str:
    """Return how the first stage is really frozen: tensor by tensor where gradients have a rank."""
    return PER_TENSOR if gradient_rank > 0 else first_stage


def skips_input_grads(first_stage: str, skip_input_grads: str) -> bool:
    """Return whether backwards that nobody needs are left out; a chain that is kept needs all."""
    return first_stage == ALL_OR_NOTHING and skip_input_grads == USE


def ratio_errors(
    max_freeze_ratio: float | Sequence[float] | str, n_stages: int | None
) -> Iterator[str]:
    """Yield what is wrong with r_max. ``n_stages`` is None where that is not known yet."""
    name = key("max_freeze_ratio")
    if isinstance(max_freeze_ratio, str):
        if max_freeze_ratio != AUTO:
            yield f'{name} is {max_freeze_ratio!r}; it must lie in [0, 1] or be "{AUTO}"'
        return
    is_one = not isinstance(max_freeze_ratio, (list, tuple))
    values = [max_freeze_ratio] if is_one else list(max_freeze_ratio)  # type: ignore[arg-type]
    for value in values:
        if not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
            yield f"{name} is {value!r}; it must lie in [0, 1]"
    if not values:
        yield f"{name} is []; it needs one value, or one for each stage"
    elif not is_one and n_stages is not None and len(values) != n_stages:
        yield (
            f"{name} has {len(values)} values; it needs one, or one for each of the {n_stages} "
            "stages"
        )


def delay_errors(phases: PhaseSchedule, solver_delay_steps: int | None) -> Iterator[str]:
    """Yield what is wrong with the steps that a plan is solved in."""
    n_ramp_steps = phases.last_ramp_step - phases.last_monitor_step
    delay = 0 if solver_delay_steps is None or not phases.measures else solver_delay_steps
    if delay < 0 or delay >= max(1, n_ramp_steps):
        yield (
            f"{key('solver_delay_steps')} is {delay}; it must be 0 or more and below the "
            f"{n_ramp_steps} steps of the ramp ({key('monitor')} to {key('ramp')})"
        )
