"""What a user chooses about freezing, and about what follows from a frozen front."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from timelyfreeze.files import Fraction, OneOf, Within
from timelyfreeze.settings.names import AtLeast0, key, rule_errors
from timelyfreeze.settings.phases import PhaseSchedule

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


GIB = 1024**3
_Room = Annotated[float, Within(0.0)]


@dataclass(frozen=True)
class CacheSettings:
    """Whether what the frozen front puts out for a row is read in later epochs."""

    enable: bool = False
    """Read what the frozen front puts out for a row instead of computing it again. For methods that
    freeze the front and make no plan, and data whose rows come again: see docs/front.md."""

    memory_gib: _Room = 4.0
    """Memory of the host, GiB for each process, that rows are kept in first. 0: none."""

    disk_gib: _Room = 0.0
    """Room on the disk, GiB for each host, for rows that do not fit into memory. Its processes
    share it, and find these rows again after a move or a resume. Rows that are read ahead take up
    to 1 GiB of memory more. 0: none."""

    folder: str = "activation_cache"
    """Where those rows are written, below job.dump_folder if it is not absolute. Only one run at a
    time can use a folder. What it holds may be deleted whenever no run uses it."""

    def errors(self) -> Iterator[str]:
        """Yield what is wrong with the settings: key, value and rule."""
        yield from rule_errors(self, "cache")
        if self.memory_gib == self.disk_gib == 0.0:
            yield (
                f"{key('cache.memory_gib')} is 0.0, and {key('cache.disk_gib')} too, so nothing "
                "can be kept; make one of them larger"
            )
        if self.disk_gib > 0.0 and not self.folder:
            yield f"{key('cache.folder')} is empty, and {key('cache.disk_gib')} is {self.disk_gib}"


@dataclass(frozen=True)
class ActivationCache:
    """The cache of a trainer of one's own; see docs/library.md for what its data has to keep to.

    Args:
        memory_gib: Memory of the host, GiB for each process, that rows are kept in first.
        disk_gib: Room on the disk, GiB for each host, for rows that do not fit into memory; its
            processes share it.
        folder: Where those are written. Only one run at a time can use a folder.
        identity: What outputs of the front depend on besides its weights and a row's tokens, as
            text: the model's settings, types of numbers. Files of another identity are not read.
        layers: What the modules of the stages call the ``nn.ModuleDict`` of their blocks.
        embedding: What that of the first stage calls its embedding.
    """

    memory_gib: float = 4.0
    disk_gib: float = 0.0
    folder: str = "activation_cache"
    identity: str = ""
    layers: str = "layers"
    embedding: str = "tok_embeddings"

    def errors(self) -> Iterator[str]:
        """Yield what is wrong with the settings: argument, value and rule."""
        yield from CacheSettings(True, self.memory_gib, self.disk_gib, self.folder).errors()
        if self.disk_gib > 0.0 and not self.identity:
            yield (
                f"{key('cache.identity')} is empty, and {key('cache.disk_gib')} is "
                f"{self.disk_gib}; files outlive a run, so name what outputs depend on besides "
                "weights and tokens: the model's settings, types of numbers"
            )


NONE = "none"
EFFICIENCY = "efficiency"
LINEAR = "linear"


@dataclass(frozen=True)
class PackingSettings:
    """Whether batches grow, or ranks become fewer, as the front of the model freezes."""

    mode: Annotated[str, OneOf(NONE, "performance", EFFICIENCY)] = NONE
    """"performance": use memory that the frozen front sets free for larger microbatches, so that a
    step takes fewer gradient accumulations. "efficiency": once the model fits on fewer ranks, go on
    with as many processes, from a checkpoint. "none": both stay. For methods that freeze the front
    and make no plan: see docs/front.md."""

    max_global_batch: AtLeast0 = 0
    """Once a step is down to one batch, training.global_batch_size may grow up to this, in whole
    multiples; the run then takes fewer steps for the same rows. 0: it stays."""

    learning_rate: Annotated[str, OneOf(NONE, LINEAR, "sqrt")] = NONE
    """How the learning rate grows with the global batch: "none" (not at all), "linear" (as the
    batch does) or "sqrt" (as its square root)."""

    @property
    def is_on(self) -> bool:
        """Whether batches may grow, or ranks become fewer."""
        return self.mode != NONE

    @property
    def gives_back(self) -> bool:
        """Whether ranks may become fewer."""
        return self.mode == EFFICIENCY

    def rate_factor(self, growth: int) -> float:
        """Return what the learning rate is multiplied with where steps have more rows."""
        if self.learning_rate == NONE:
            return 1.0
        return float(growth) if self.learning_rate == LINEAR else math.sqrt(growth)

    def errors(self) -> Iterator[str]:
        """Yield what is wrong with the settings: key, value and rule."""
        yield from rule_errors(self, "packing")
        if self.gives_back:
            for name, kept in (("max_global_batch", 0), ("learning_rate", NONE)):
                if (value := getattr(self, name)) != kept:
                    yield (
                        f"{key(f'packing.{name}')} is {value!r}; with packing.mode {EFFICIENCY!r} "
                        f"steps keep their rows, so it must be {kept!r}"
                    )


@dataclass(frozen=True)
class ElasticSettings:
    """Whether a frozen front makes the pipeline shorter, and replicas of it take the free ranks."""

    enable: bool = False
    """Move the model onto half as many pipeline ranks once enough of its front is frozen for them,
    and train replicas on the ranks that this frees. For methods that freeze the front, alone or
    with a plan, which is made anew then: see docs/front.md."""

    partition: Annotated[str, OneOf("parameters", "time")] = "parameters"
    """What is even where the model is cut anew: "parameters", or "time", by the profile that
    parallelism.partition_profile names."""

    frozen_cost: Fraction = 1 / 6
    """lambda, in [0, 1]: what a frozen layer counts where the model is cut by parameters, as a
    fraction of a live one."""

    min_ranks: Annotated[int, Within(2)] = 2
    """The pipeline becomes no shorter than this, 2 at least."""

    global_batch: Annotated[str, OneOf("constant", "paper")] = "constant"
    """Rows of a step: "constant", which replicas share, or "paper": each replica has as many as
    the pipeline of the start, and the run takes fewer steps for the same rows."""

    search_microbatches: bool = False
    """Try, while learning goes on, up to 4 numbers of microbatches from K to 6 K once for each
    length K of the pipeline, and keep the fastest. The rows of a step stay."""

    join_limit_s: float = 120.0
    """Seconds, above 0 and below comm.init_timeout_seconds, that ranks which are ready for a move
    wait for the others; without them the run goes on as before."""

    @property
    def is_by_time(self) -> bool:
        """Whether the model is cut anew by measured times."""
        return self.enable and self.partition == "time"

    @property
    def searches(self) -> bool:
        """Whether numbers of microbatches are tried."""
        return self.enable and self.search_microbatches

    @property
    def rows_grow(self) -> bool:
        """Whether a step has more rows where there are more replicas."""
        return self.global_batch == "paper"

    def errors(self) -> Iterator[str]:
        """Yield what is wrong with the settings: key, value and rule."""
        yield from rule_errors(self, "elastic")
