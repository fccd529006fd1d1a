"""Where stages are built and measured, one at a time, so that only one needs memory."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import torchtitan.distributed.pipeline_parallel as titan_pipeline
import torchtitan.tools.utils as titan_tools
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as titan_dist
from torchtitan.protocols import ModelProtocol
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import TrainSpec

from timelyfreeze.masks import draw_uniform, mask_rng
from timelyfreeze.schedule import ActionKind
from timelyfreeze.settings import ALL_OR_NOTHING, PER_TENSOR
from torchtitan.freezing.config import JobConfig, count_layers, examples_of_microbatch
from torchtitan.freezing.profile.stage import LoneStage, Microbatch
from torchtitan.upstream.fixes import autocast_stages


@dataclass(frozen=True)
class Spread:
    """Several measurements of one thing, milliseconds.

    Attributes:
        median_ms: The middle one.
        quartiles_ms: A quarter lies below the first, a quarter above the second.
        n: How many there are.
    """

    median_ms: float
    quartiles_ms: tuple[float, float]
    n: int


def spread(times_ms: Sequence[float]) -> Spread:
    """Sum up measurements, of which there must be one or more."""
    low, middle, high = np.quantile(np.array(times_ms), [0.25, 0.5, 0.75]).tolist()
    return Spread(middle, (low, high), len(times_ms))


@dataclass(frozen=True)
class Point:
    """Backwards that were frozen at one ratio.

    Attributes:
        ratio: The ratio that masks were drawn with.
        fractions: Fraction of elements that each mask froze.
        times_ms: How long each backward took, milliseconds.
    """

    ratio: float
    fractions: tuple[float, ...]
    times_ms: tuple[float, ...]

    @property
    def fraction(self) -> float:
        """Mean fraction of elements that was frozen."""
        return statistics.fmean(self.fractions)


@dataclass(frozen=True)
class Line:
    """How well backward time is a straight line in the freeze ratio.

    Attributes:
        unfrozen_ms: Measured median with nothing frozen.
        frozen_ms: Measured median with everything frozen.
        largest_miss_ms: Of the points in between, the measured median that is farthest from the
            line through these two, minus what the line says. 0 if there are none.
        largest_miss: The same as a fraction of ``unfrozen_ms``.
        fit_unfrozen_ms: Least-squares line through all medians, at ratio 0.
        fit_frozen_ms: The same at ratio 1.
        fit_residual_ms: The largest distance of a median from it.
        r_squared: Fraction of the medians' variance that it explains; 1 if there is none.
    """

    unfrozen_ms: float
    frozen_ms: float
    largest_miss_ms: float
    largest_miss: float
    fit_unfrozen_ms: float
    fit_frozen_ms: float
    fit_residual_ms: float
    r_squared: float


def fit_line(points: Sequence[Point]) -> Line:
    """Compare a response with the line that a plan assumes, and with the best line.

    Args:
        points: With ratios 0 and 1 among them.

    Raises:
        ValueError: If one of these is missing.
    """
    by_ratio = {point.ratio: statistics.median(point.times_ms) for point in points}
    if 0.0 not in by_ratio or 1.0 not in by_ratio:
        raise ValueError(
            f"the ratios {sorted(by_ratio)} do not tell the line; it needs 0 and 1 among them"
        )
    unfrozen_ms, frozen_ms = by_ratio[0.0], by_ratio[1.0]
    fractions = np.array([point.fraction for point in points])
    medians_ms = np.array([statistics.median(point.times_ms) for point in points])
    misses_ms = medians_ms - (unfrozen_ms - fractions * (unfrozen_ms - frozen_ms))
    between = np.array([0.0 < point.ratio < 1.0 for point in points])
    miss_ms = 0.0
    if between.any():
        miss_ms = float(max(misses_ms[between].tolist(), key=abs))
    design = np.stack([np.ones_like(fractions), fractions], axis=1)
    (start_ms, slope_ms), *_ = np.linalg.lstsq(design, medians_ms, rcond=None)
    residuals_ms = medians_ms - (start_ms + slope_ms * fractions)
    variance = float(((medians_ms - medians_ms.mean()) ** 2).sum())
    return Line(
        unfrozen_ms=unfrozen_ms,
        frozen_ms=frozen_ms,
        largest_miss_ms=miss_ms,
        largest_miss=miss_ms / unfrozen_ms if unfrozen_ms > 0.0 else 0.0,
        fit_unfrozen_ms=float(start_ms),
        fit_frozen_ms=float(start_ms + slope_ms),
        fit_residual_ms=float(np.abs(residuals_ms).max()),
        r_squared=1.0 - float((residuals_ms**2).sum()) / variance if variance > 0.0 else 1.0,
    )


@dataclass(frozen=True)
class Response:
    """What was measured of one stage under one way of freezing it.

    Attributes:
        stage: The stage; None for one that was made only to measure what a layer takes.
        n_layers: How many layers it has.
        first_stage: For the first stage, which of ``settings.FIRST_STAGE_MODES`` it ran under.
        forward_ms: Times of F, over all batches.
        input_ms: Times of I, over all batches with a split backward.
        curves: Backward times by ratio: of B, and of W where split backwards were measured.
    """

    stage: int | None
    n_layers: int
    first_stage: str | None
    forward_ms: tuple[float, ...]
    input_ms: tuple[float, ...]
    curves: dict[ActionKind, tuple[Point, ...]]

    def ends(self, kind: ActionKind) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the times of ``kind`` with everything and with nothing frozen."""
        by_ratio = {point.ratio: point.times_ms for point in self.curves[kind]}
        return by_ratio[1.0], by_ratio[0.0]


@dataclass(frozen=True)
class Repeats:
    """How often to measure.

    Attributes:
        ratios: Freeze ratios, 0 and 1 among them, in ascending order.
        cold: Rounds that are run first and thrown away; a round runs every ratio once.
        kept: Rounds that count.
    """

    ratios: tuple[float, ...]
    cold: int
    kept: int


@dataclass
class Bench:
    """Builds stages and measures them, one at a time."""

    config: JobConfig
    spec: TrainSpec
    model_args: Any
    repeats: Repeats
    splits: Sequence[bool]
    report: Callable[[Response], None]

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

    def measure(self, stage: int, names: list[str], n_stages: int) -> tuple[list[Response], int]:
        """Measure a stage: the first one both ways; return the peak of memory beside."""
        is_first, is_last = stage == 0, stage == n_stages - 1
        lone = self._build(names, is_first=is_first, is_last=is_last)
        (n_layers,) = count_layers([names])
        responses = []
        for mode in (ALL_OR_NOTHING, PER_TENSOR) if is_first else (None,):
            if mode == PER_TENSOR:
                lone.attach(per_tensor=True)
            responses.append(self._respond(lone, stage, n_layers, mode))
            self.report(responses[-1])
        stats = titan_tools.device_module.memory_stats(self._device)
        peak_bytes: int = stats.get("reserved_bytes.all.peak", -1)
        del lone
        self._let_go()
        return responses, peak_bytes

    def probe(self, n_layers: int) -> Response:
        """Measure a stage in the middle with the first ``n_layers`` layers of the model."""
        names = [f"layers.{i}" for i in range(n_layers)]
        lone = self._build(names, is_first=False, is_last=False)
        response = self._respond(lone, None, n_layers, None)
        self.report(response)
        del lone
        self._let_go()
        return response

    def _build(self, names: list[str], *, is_first: bool, is_last: bool) -> LoneStage:
        """Cut the stage with these modules out of the model, as upstream does, and fill it."""
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
            self._model, cast(Any, mesh), "1F1B", self._device, modules
        )
        part = self.spec.parallelize_fn(part, self._dims, config)
        autocast_stages([part], self._dims, config, self._device)
        part.to_empty(device=self._device)
        with torch.no_grad():
            cast(ModelProtocol, part).init_weights(buffer_device=None)
        part.train()
        titan_tools.device_module.reset_peak_memory_stats(self._device)
        return LoneStage(
            part, self._microbatch(), self._loss_fn, is_first=is_first, is_last=is_last
        )

    def _microbatch(self) -> Microbatch:
        shape = (examples_of_microbatch(self.config), self.config.training.seq_len)
        tokens, labels = (
            torch.randint(self.model_args.vocab_size, shape, device=self._device) for _ in range(2)
        )
        return Microbatch(tokens, labels, self.model_args.dim, self._dtype)

    def _respond(
        self, lone: LoneStage, stage: int | None, n_layers: int, mode: str | None
    ) -> Response:
        """Run every ratio in turns, so that whatever drifts hits all of them."""
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

    def _let_go(self) -> None:
        """Give back the memory of a stage that nobody holds any more."""
        gc.collect()
        titan_tools.device_module.empty_cache()
