"""Choices about freezing: the keys of ``[freezing]``, the arguments of the library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

from timelyfreeze.files import OneOf, Within
from timelyfreeze.settings.names import AtLeast0, key, rule_errors
from timelyfreeze.settings.phases import HALVES, MONITORING_WAYS, PhaseSchedule

ALL_OR_NOTHING = "all_or_nothing"
PER_TENSOR = "per_tensor"
FIRST_STAGE_MODES = (ALL_OR_NOTHING, PER_TENSOR)

AUTO = "auto"
# What "auto" takes as gradient_rank: of a model this wide these ranks, or the middle one where the
# warm-up is too short to compare them.
WIDE, RANKS, STEPS_TO_COMPARE = 512, (16, 32, 64), 3

OFF = "off"
USE = "use"
SKIP_INPUT_GRADS = (OFF, USE)

DEVICE = "device"
HOST = "host"


@dataclass(frozen=True)
class FreezeSettings:
    """Settings of freezing: ends of phases, amount and kind of freezing.

    A field is a key of ``[freezing]`` and an argument of :class:`timelyfreeze.TimelyFreeze`. The
    text under a field is its ``--help`` and its row in ``docs/configuration.md``.
    """

    last_warmup_step: AtLeast0 = 60
    """T_w: up to this step nothing is frozen or measured, whatever the method. Past the point where
    the loss falls steeply. lr_scheduler.warmup_steps is a good measure."""

    last_monitor_step: int = 100
    """T_m, for methods with a plan, at least T_w + 2 (mixed: 3): in the steps from T_w to here each
    action is timed with nothing frozen and with everything frozen. At its end the freeze ratios are
    solved."""

    monitoring: Annotated[str, OneOf(*MONITORING_WAYS)] = HALVES
    """How both are measured. "halves": first the one and then the other, as the paper does. Steps
    with everything frozen change no weights, or in their subspaces alone. "mixed": in every batch
    some backwards are frozen whole and the others not at all, in the next batch the other way
    round, so that every step learns."""

    last_ramp_step: int = 200
    """T_f, for methods with a plan, above T_m: from T_m to here freeze ratios grow linearly from 0
    to the solved values, which hold from then on."""

    max_freeze_ratio: float | list[float] | str = AUTO
    """r_max, in [0, 1]: one value, or one for each stage. It caps the mean freeze ratio of a
    stage's backwards. "auto" takes the cap with which a loss is estimated to be reached soonest,
    and freezes nothing where none is (see docs/low_rank.md). The paper has 0.8."""

    gradient_rank: int | list[int] | str = AUTO
    """What frozen means, for methods with a plan. 0: a frozen weight gets no gradient, as in the
    paper. k above 0: a frozen weight of a linear layer still gets the part of its gradient that
    lies in k directions of the layer's shorter side, which costs little and keeps most of the
    learning. Only those weights are frozen then (see docs/low_rank.md). Of several, ascending, the
    warm-up takes the one with which a loss is estimated to be reached soonest. "auto": 16, 32 and
    64 for text models at least 512 wide, else 0, as where it does not work (tensor parallelism)."""

    seed: Annotated[int, Within(0, 2**64, below=True)] = 42
    """Seed of the random choice of parameters or layers, and of adapters. The same masks come out
    on every data-parallel replica."""

    first_stage: Annotated[str, OneOf(*FIRST_STAGE_MODES)] = ALL_OR_NOTHING
    """How the first stage, which has no input gradient to compute, is frozen. "all_or_nothing": for
    a microbatch either whole or not at all, with the ratio as probability. "per_tensor": tensor by
    tensor as in other stages. Gradients then always run down to the embedding, so that time falls
    linearly with the ratio, but not to zero. It needs an embedding there that the library knows."""

    skip_input_grads: Annotated[str, OneOf(*SKIP_INPUT_GRADS)] = USE
    """Where all earlier stages are frozen whole for a microbatch, a stage that is frozen whole too
    need not compute input gradients: nobody uses them. "off": compute them anyway. "use": skip
    them, and count on it in the plan. Has no effect with first_stage "per_tensor"."""

    discard_batches: AtLeast0 = 2
    """Pipeline batches left out of measurements after each change of phase: the first ones are
    slower."""

    solver_time_limit_s: Annotated[float, Within(0.0, above=True)] = 60.0
    """Give up solving after this many seconds and train on without freezing. Below
    comm.train_timeout_seconds and comm.init_timeout_seconds, for which other ranks wait."""

    solver_delay_steps: int | None = None
    """Steps that training goes on while the ratios are solved in the background, fewer than the
    ramp has. 0 waits for them. Unset: 0 up to 1,024 actions, which take a fraction of a second,
    above that a tenth of the ramp."""

    replan_every: AtLeast0 = 100
    """After so many steps of the stable phase, again and again, the times of the last batches are
    compared with those that the plan was made from. 0 for never."""

    replan_threshold: Annotated[float, Within(0.0, above=True)] = 0.1
    """Fraction by which the times of a stage's forwards or backwards must have changed for the
    ratios to be solved again. Below 0.05 noise makes plans."""

    min_gain: Annotated[float, Within(-1.0)] = 0.02
    """Smallest gain in throughput, as a fraction: 0.02 is 2%. Where the plan promises less, or two
    checks of replan_every in a row find less by two standard errors, freezing is switched off for
    the rest of the run. -1 never switches it off."""

    control_every: AtLeast0 = 20
    """For methods with a plan: one step in so many after the ramp freezes nothing, at least 3. The
    gain is measured by such steps and those around them, so that it holds where the machine becomes
    slower or faster. It costs a small part of the gain, and the step learns in full. 0 for none:
    then the gain is measured by the steps before freezing."""

    score_memory: Annotated[str, OneOf(DEVICE, HOST)] = DEVICE
    """Where policies keep the vectors their scores are made from (weights at the last check, sums
    of gradients, running means): "device", beside the parameters, or "host"."""

    score_dtype: Annotated[str, OneOf("float32", "bfloat16")] = "float32"
    """Type of those vectors: "float32" or "bfloat16", which takes half the memory. Weights kept in
    bfloat16 hide changes smaller than half a step of it, unless the weights are bfloat16 too."""

    @cached_property
    def phases(self) -> PhaseSchedule:
        """The boundaries; ``ValueError`` if they break a rule."""
        plans = self.last_monitor_step != self.last_warmup_step
        return PhaseSchedule(
            self.last_warmup_step,
            self.last_monitor_step,
            self.last_ramp_step,
            self.monitoring,
            control_every=self.control_every if plans else 0,
        )

    @property
    def unplanned(self) -> FreezeSettings:
        """The settings of a method without a plan: a warm-up, then the stable phase."""
        last = self.last_warmup_step
        return replace(self, last_monitor_step=last, last_ramp_step=last, gradient_rank=0)

    def errors(self, *, plans: bool = True, n_stages: int | None = None) -> Iterator[str]:
        """Yield errors of the settings: key, value and rule.

        ``plans``: whether the method makes a plan. ``n_stages``: possible number of values of
        ``max_freeze_ratio``, None if unknown.
        """
        broken = [*rule_errors(self), *rank_errors(self.gradient_rank)]
        yield from broken
        if not plans:
            return
        yield from ratio_errors(self.max_freeze_ratio, n_stages)
        if self.control_every in (1, 2):
            yield (
                f"{key('control_every')} is {self.control_every}; it must be 0, or at least 3, so "
                "that most steps freeze"
            )
        try:
            phases = self.phases
        except ValueError as error:
            if str(error) not in broken:
                yield str(error)
            return
        if not phases.measures:
            yield (
                f"{key('last_monitor_step')} is {self.last_monitor_step}, as "
                f"{key('last_warmup_step')}; a plan needs steps in between to measure in"
            )
            return
        n_batches, rule = phases.measured_batches
        if self.discard_batches > n_batches:
            yield (
                f"{key('discard_batches')} is {self.discard_batches}; it must {rule} "
                f"({key('last_warmup_step')} {self.last_warmup_step} to "
                f"{key('last_monitor_step')} {self.last_monitor_step})"
            )
        n_ramp_steps = self.last_ramp_step - self.last_monitor_step
        if not 0 <= (self.solver_delay_steps or 0) < n_ramp_steps:
            yield (
                f"{key('solver_delay_steps')} is {self.solver_delay_steps}; it must be 0 or more "
                f"and below the {n_ramp_steps} steps of the ramp ({key('last_monitor_step')} to "
                f"{key('last_ramp_step')})"
            )

    @property
    def gradient_ranks(self) -> tuple[int, ...]:
        """The candidate ranks of the warm-up; a single rank if given. Not of "auto"."""
        ranks = self.gradient_rank
        assert not isinstance(ranks, str), "auto_rank tells it once the model is known"
        return (ranks,) if isinstance(ranks, int) else tuple(ranks)

    @property
    def freezes_first_stage_whole(self) -> bool:
        """Whether the first stage is frozen all or nothing."""
        return first_stage_mode(self.first_stage, max(self.gradient_ranks)) == ALL_OR_NOTHING

    @property
    def skips_input_grads(self) -> bool:
        """Whether useless backwards are left out."""
        mode = first_stage_mode(self.first_stage, max(self.gradient_ranks))
        return skips_input_grads(mode, self.skip_input_grads)


def auto_rank(width: int, last_warmup_step: int) -> int | list[int]:
    """Return the ``gradient_rank`` of "auto" for a model of a width, 0 where subspaces do not work.

    In narrow layers turning subspaces costs the savings of freezing (``docs/low_rank.md``).
    """
    if width < WIDE:
        return 0
    return [*RANKS] if last_warmup_step >= STEPS_TO_COMPARE else RANKS[1]


def rank_errors(gradient_rank: int | list[int] | str) -> Iterator[str]:
    """Yield errors of the rank of gradients."""
    if gradient_rank == AUTO:
        return
    is_list = isinstance(gradient_rank, list)
    ranks: list[Any] = gradient_rank if isinstance(gradient_rank, list) else [gradient_rank]
    are_numbers = all(isinstance(k, int) and not isinstance(k, bool) for k in ranks)
    if not (ranks and are_numbers and ranks == sorted(set(ranks)) and ranks[0] >= int(is_list)):
        yield (
            f"{key('gradient_rank')} is {gradient_rank!r}; it must be a whole number, 0 or more, "
            f'a list of some above 0, ascending, or "{AUTO}"'
        )


def first_stage_mode(first_stage: str, gradient_rank: int) -> str:
    """Return how the first stage is really frozen: tensor by tensor where gradients have a rank."""
    return PER_TENSOR if gradient_rank > 0 else first_stage


def skips_input_grads(first_stage: str, skip_input_grads: str) -> bool:
    """Return whether useless backwards are left out; a complete chain needs all."""
    return first_stage == ALL_OR_NOTHING and skip_input_grads == USE


def ratio_errors(
    max_freeze_ratio: float | Sequence[float] | str, n_stages: int | None
) -> Iterator[str]:
    """Yield errors of r_max. ``n_stages`` is None if unknown."""
    name = key("max_freeze_ratio")
    if isinstance(max_freeze_ratio, str):
        if max_freeze_ratio != AUTO:
            yield f'{name} is {max_freeze_ratio!r}; it must lie in [0, 1] or be "{AUTO}"'
        return
    is_one = isinstance(max_freeze_ratio, int | float)
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
