"""A bench building and measuring a stage at a time, with memory for one only."""

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torchtitan.distributed.pipeline_parallel as titan_pipeline
import torchtitan.tools.utils as titan_tools
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as titan_dist
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import TrainSpec

from timelyfreeze.policies import ParameterTable, build_parameter_table, draw_uniform, mask_rng
from timelyfreeze.runtime import (
    NOTHING_FROZEN,
    ActionRecorder,
    Clock,
    FreezingStage,
    clock_for,
    run_batches_in,
)
from timelyfreeze.runtime.linear import keep_copies, linears_of
from timelyfreeze.schedule import ActionKind
from timelyfreeze.settings import ALL_OR_NOTHING, PER_TENSOR
from torchtitan.data.sequences import IGNORE_INDEX, learned_tokens
from torchtitan.settings import JobConfig, count_layers, examples_of_microbatch
from torchtitan.upstream.fixes import PipelineLoss, autocast_stages, one_cast_for_all


def spread(times_ms: Sequence[float]) -> dict[str, Any]:
    """Return median, quartiles and number of one or more measurements."""
    low, middle, high = np.quantile(np.array(times_ms), [0.25, 0.5, 0.75]).tolist()
    return {"median_ms": middle, "quartiles_ms": (low, high), "n": len(times_ms)}


@dataclass(frozen=True)
class Point:
    """Backwards frozen at the same ratio."""

    ratio: float  # the ratio that masks were drawn with
    fractions: tuple[float, ...]  # fraction of elements that each mask froze
    times_ms: tuple[float, ...]  # how long each backward took, milliseconds

    @property
    def fraction(self) -> float:
        """Mean frozen fraction of elements."""
        return statistics.fmean(self.fractions)


@dataclass(frozen=True)
class Line:
    """How well backward time is a straight line in the freeze ratio."""

    unfrozen_ms: float  # measured median with nothing frozen
    frozen_ms: float  # measured median with everything frozen
    # of the points in between, the measured median that is farthest from the line through these
    # two, minus what the line says. 0 if there are none
    largest_miss_ms: float
    largest_miss: float  # the same as a fraction of ``unfrozen_ms``
    fit_unfrozen_ms: float  # least-squares line through all medians, at ratio 0
    fit_frozen_ms: float  # the same at ratio 1
    fit_residual_ms: float  # the largest distance of a median from it
    r_squared: float  # fraction of the medians' variance that it explains; 1 if there is none


def fit_line(points: Sequence[Point]) -> Line:
    """Compare a response, ratios 0 and 1 included, with a plan's line and with the best line."""
    fractions = np.array([point.fraction for point in points])
    medians_ms = np.array([statistics.median(point.times_ms) for point in points])
    by_ratio = {p.ratio: ms for p, ms in zip(points, medians_ms.tolist(), strict=True)}
    unfrozen_ms, frozen_ms = by_ratio[0.0], by_ratio[1.0]
    misses_ms = medians_ms - (unfrozen_ms - fractions * (unfrozen_ms - frozen_ms))
    between = [0.0 < point.ratio < 1.0 for point in points]
    miss_ms = max(misses_ms[between].tolist(), key=abs, default=0.0)
    design = np.stack([np.ones_like(fractions), fractions], axis=1)
    (start_ms, slope_ms), *_ = np.linalg.lstsq(design, medians_ms, rcond=None)
    residuals_ms = medians_ms - (start_ms + slope_ms * fractions)
    variance = medians_ms.var()
    return Line(
        unfrozen_ms=unfrozen_ms,
        frozen_ms=frozen_ms,
        largest_miss_ms=miss_ms,
        largest_miss=miss_ms / unfrozen_ms if unfrozen_ms > 0.0 else 0.0,
        fit_unfrozen_ms=float(start_ms),
        fit_frozen_ms=float(start_ms + slope_ms),
        fit_residual_ms=float(np.abs(residuals_ms).max()),
        r_squared=float(1.0 - (residuals_ms**2).mean() / variance) if variance > 0.0 else 1.0,
    )


@dataclass(frozen=True)
class Response:
    """Measurements of a stage under a way of freezing."""

    stage: int | None  # the stage; None for one that was made only to measure what a layer takes
    n_layers: int
    # for the first stage, which of ``settings.FIRST_STAGE_MODES`` it ran under
    first_stage: str | None
    forward_ms: tuple[float, ...]  # times of F, over all batches
    input_ms: tuple[float, ...]  # times of I, over all batches with a split backward
    # backward times by ratio: of B, and of W where split backwards were measured
    curves: dict[ActionKind, tuple[Point, ...]]

    def ends(self, kind: ActionKind) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the times of ``kind`` with everything and with nothing frozen."""
        alike = {ActionKind.FORWARD: self.forward_ms, ActionKind.INPUT_BACKWARD: self.input_ms}
        if kind in alike:
            return alike[kind], alike[kind]
        by_ratio = {point.ratio: point.times_ms for point in self.curves[kind]}
        return by_ratio[1.0], by_ratio[0.0]


@dataclass(frozen=True)
class Repeats:
    """How often to measure."""

    ratios: tuple[float, ...]  # freeze ratios, 0 and 1 among them, in ascending order
    cold: int  # rounds that are run first and thrown away; a round runs every ratio once
    kept: int  # rounds that count


def profile_clock(device: torch.device) -> Clock:
    """Return a run's clock; with a single thread on a CPU other processes do not count."""
    return clock_for(device, lone=torch.get_num_threads() == 1)


class LoneStage:
    """A stage between stand-ins for its neighbours, in a process group of one rank.

    Token ids and targets have the shape [sequences, tokens of a sequence] of a batch, ``hidden``
    shape and type of a microbatch's message between stages. Measured is the second microbatch of a
    batch, or its only one. ``of_last`` marks learned tokens for a last stage. Gradients stay from
    batch to batch, as microbatches add them up.
    """

    def __init__(
        self,
        module: nn.Module,
        tokens: Tensor,
        labels: Tensor,
        hidden: Tensor,
        loss_fn: Callable[..., Tensor],
        *,
        is_first: bool,
        is_last: bool,
        gradient_rank: int = 0,
        of_last: Mapping[str, Tensor] = MappingProxyType({}),
        n_microbatches: int = 1,
    ) -> None:
        device = tokens.device
        self._n_microbatches = n_microbatches
        self.measured = min(1, n_microbatches - 1)
        modules: list[nn.Module] = [module]
        if not is_first:
            modules.insert(0, _Neighbour(hidden, is_first=True))
        if not is_last:
            modules.append(_Neighbour(hidden, is_first=False))
        place = modules.index(module)
        self._tokens, self._labels = tokens, labels
        self._recorder = ActionRecorder(profile_clock(device))
        self.stage = FreezingStage(module, place, len(modules), device)
        self._stages = [
            self.stage if other is module else PipelineStage(other, i, len(modules), device)
            for i, other in enumerate(modules)
        ]
        self._loss = PipelineLoss(
            loss_fn if is_last else lambda output, labels: output.sum(), of_learned=bool(of_last)
        )
        self._of_last = of_last
        self._rank = gradient_rank
        self.table = self.attach(per_tensor=gradient_rank > 0)
        timed = self._recorder.measure_more if is_last else nullcontext
        self._schedules: list[Any] = []  # with full backwards, and with split ones
        for schedule in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
            self._schedules.append(
                schedule(self._stages, n_microbatches, loss_fn=self._loss, scale_grads=False)
            )
            run_batches_in(self._schedules[-1], self._recorder.recorded_batch, timed)

    def attach(self, *, per_tensor: bool) -> ParameterTable:
        """Attach clocks and masks, again for a first stage with its chain of gradients."""
        self.stage.attach(self._recorder, per_tensor=per_tensor, gradient_rank=self._rank)
        if self.stage.low_rank is not None:
            # Once for all microbatches of a batch: no part of one.
            self.stage.low_rank.add_to_gradients = lambda: None  # type: ignore[method-assign]
        sizes = self.stage.parameter_sizes.tolist()
        return build_parameter_table(zip(self.stage.parameter_names, sizes, strict=True))

    def run(self, mask: NDArray[np.bool_], *, split: bool) -> float:
        """Run a batch under a mask, as ``table``; return the frozen fraction."""
        mask = mask & ~self.stage.exact
        masks = dict.fromkeys(range(self._n_microbatches), mask)
        self.stage.freeze(masks if mask.any() else NOTHING_FROZEN)
        step, labels = self._schedules[split].step, self._labels
        copies = keep_copies([self.stage.submod])
        with self._loss.divided_by(labels.numel()), one_cast_for_all(), copies:
            step(self._tokens, target=labels, losses=[], return_outputs=False, **self._of_last)
        self.stage.freeze_nothing()
        return self.stage.applied_ratios[self.measured]

    def take_times(self) -> list[dict[ActionKind, float]]:
        """Wait for the device; return milliseconds by kind, for all batches since the last call."""
        return [
            {a.kind: ms for a, ms in record.durations_ms.items() if a.microbatch == self.measured}
            for record in self._recorder.drain()
        ]


class _Neighbour(nn.Module):
    """Sends noise in the shape of messages, or gets a gradient as the last stage."""

    def __init__(self, hidden: Tensor, *, is_first: bool) -> None:
        super().__init__()
        self._is_first = is_first
        self.scale = nn.Parameter(hidden.new_ones(()))
        self.register_buffer("noise", torch.randn_like(hidden))

    def forward(self, received: Tensor, **of_last: Tensor) -> Tensor:
        # Whatever the tokens are, they are not looked at.
        return self.noise * self.scale if self._is_first else received * self.noise * self.scale


@dataclass
class Bench:
    """Builds and measures stages, one at a time."""

    config: JobConfig
    spec: TrainSpec
    model_args: Any
    repeats: Repeats
    splits: Sequence[bool]
    report: Callable[[Response], None]
    learned_share: float | None = None  # of tokens; None if the head gets all, learned or not

    def __post_init__(self) -> None:
        """Build the model without memory."""
        config, spec = self.config, self.spec
        self._dims = ParallelDims(
            dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1
        )
        self._device = torch.device(
            titan_tools.device_type, titan_tools.device_module.current_device()
        )
        titan_dist.set_determinism(self._dims, self._device, config.debug, [])
        self._dtype = TORCH_DTYPE_MAP[config.training.dtype]
        with torch.device("meta"), titan_tools.set_default_dtype(self._dtype):
            self._model = spec.model_cls(self.model_args)
        build_model_converters(config, self._dims).convert(self._model)
        self._loss_fn = spec.build_loss_fn(config, parallel_dims=self._dims)

    def measure(
        self,
        names: list[str],
        stage: int | None = None,
        *,
        is_first: bool = False,
        is_last: bool = False,
    ) -> tuple[list[Response], int]:
        """Measure a stage, a first stage both ways; return the peak of memory too."""
        lone = self.build(names, is_first=is_first, is_last=is_last)
        (n_layers,) = count_layers([names])
        responses = []
        rank = max(self.config.freezing.gradient_ranks)
        # Weights that still learn in a subspace need what the chain brings.
        modes = (PER_TENSOR,) if rank else (ALL_OR_NOTHING, PER_TENSOR)
        for mode in modes if is_first else (None,):
            if mode == PER_TENSOR and not rank:
                lone.attach(per_tensor=True)
            # Weights are copied once for all microbatches of a batch: no part of one.
            with keep_copies([lone.stage.submod]):
                responses.append(self._respond(lone, stage, n_layers, mode))
            self.report(responses[-1])
        stats = titan_tools.device_module.memory_stats(self._device)
        peak_bytes: int = stats.get("reserved_bytes.all.peak", -1)
        del lone
        gc.collect()
        titan_tools.device_module.empty_cache()
        return responses, peak_bytes

    def probe(self, n_layers: int) -> Response:
        """Measure a stage in the middle with the first ``n_layers`` layers of the model."""
        (response,), _ = self.measure([f"layers.{i}" for i in range(n_layers)])
        return response

    def build(
        self,
        names: list[str],
        *,
        is_first: bool = False,
        is_last: bool = False,
        n_microbatches: int = 1,
    ) -> LoneStage:
        """Cut a stage with these modules out of the model, as upstream, and fill its weights."""
        config = self.config
        place = 0 if is_first else 1
        modules = [names if i == place else [] for i in range(place + (1 if is_last else 2))]
        # Stands in for the device mesh of a pipeline with one stage a rank, seen from one rank.
        mesh = SimpleNamespace(
            get_local_rank=lambda: place,
            size=lambda: len(modules),
            get_group=lambda name: None,  # which torch takes for the default group
        )
        _, (part,) = titan_pipeline.pipeline_module_split(
            self._model, mesh, "1F1B", self._device, modules
        )
        part = self.spec.parallelize_fn(part, self._dims, config)
        autocast_stages([part], self._dims, config, self._device)
        part.to_empty(device=self._device)
        with torch.no_grad():
            part.init_weights(buffer_device=None)
        part.train()
        titan_tools.device_module.reset_peak_memory_stats(self._device)
        shape = (examples_of_microbatch(config), config.training.seq_len)
        batch = n_microbatches * shape[0], shape[1]
        tokens, labels = (
            torch.randint(self.model_args.vocab_size, batch, device=self._device) for _ in range(2)
        )
        of_last = {}
        if is_last and self.learned_share is not None:
            labels[:, max(1, round(self.learned_share * shape[1])) :] = IGNORE_INDEX
            of_last = {n: t.to(self._device) for n, t in learned_tokens(labels.cpu()).items()}
        linears = linears_of(part)
        sent = self._dtype if linears is None or linears.dtype is None else linears.dtype
        hidden = torch.empty(*shape, self.model_args.dim, dtype=sent, device=self._device)
        return LoneStage(
            part, tokens, labels, hidden, self._loss_fn,
            is_first=is_first, is_last=is_last, gradient_rank=max(config.freezing.gradient_ranks),
            of_last=of_last, n_microbatches=n_microbatches,
        )  # fmt: skip

    def _respond(
        self, lone: LoneStage, stage: int | None, n_layers: int, mode: str | None
    ) -> Response:
        """Run the ratios in turns, so that drift affects all of them."""
        repeats = self.repeats
        # A mask of all or nothing has no ratio in between.
        ratios = (0.0, 1.0) if mode == ALL_OR_NOTHING else repeats.ratios
        ran: list[tuple[bool, float, float]] = []
        for number in range(repeats.cold + repeats.kept):
            for split in self.splits:
                for i, ratio in enumerate(ratios):
                    rng = mask_rng(self.config.freezing.seed, number, i, 0, stage or 0)
                    fraction = lone.run(draw_uniform(lone.table, ratio, rng), split=split)
                    ran.append((split, ratio, fraction))
        n_cold = repeats.cold * len(self.splits) * len(ratios)
        batches = list(zip(ran, lone.take_times(), strict=True))[n_cold:]
        curves = {}
        for split in self.splits:
            kind = ActionKind.WEIGHT_BACKWARD if split else ActionKind.FULL_BACKWARD
            points = {
                ratio: [
                    (f, times[kind]) for (s, r, f), times in batches if (s, r) == (split, ratio)
                ]
                for ratio in ratios
            }
            curves[kind] = tuple(Point(r, *zip(*pairs, strict=True)) for r, pairs in points.items())
        return Response(
            stage=stage,
            n_layers=n_layers,
            first_stage=mode,
            forward_ms=tuple(times[ActionKind.FORWARD] for _, times in batches),
            input_ms=tuple(
                times[ActionKind.INPUT_BACKWARD] for (split, _, _), times in batches if split
            ),
            curves=curves,
        )
