"""Times every stage of a configuration alone on this device, one after the other.

A model that no device could hold is profiled stage by stage: it is cut on the meta device, and only
the stage at hand gets memory. There is no optimizer.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

import torchtitan.distributed.pipeline_parallel as titan_pipeline
import torchtitan.tools.utils as titan_tools
from timelyfreeze.actions import ActionKind
from timelyfreeze.order import ScheduleOrder
from timelyfreeze.selection import draw_uniform, mask_rng
from timelyfreeze.settings import ALL_OR_NOTHING, KEEP_CHAIN
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.cpu_device import shared_cores, usable_cores
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as titan_dist
from torchtitan.freezing.config import JobConfig
from torchtitan.freezing.pipeline_layout import (
    pipeline_order,
    rows_of_microbatch,
    stage_modules,
)
from torchtitan.freezing.pipeline_notes import count_layers
from torchtitan.freezing.profile_checks import model_not_covered, not_covered
from torchtitan.freezing.profile_response import Point, Response
from torchtitan.freezing.profile_stage import LoneStage, Microbatch
from torchtitan.freezing.spec import build_train_spec
from torchtitan.protocols import ModelProtocol
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec
from torchtitan.upstream_fixes import autocast_stages


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


@dataclass(frozen=True)
class Profile:
    """What was measured of a configuration.

    Attributes:
        order: The schedule of the configuration.
        layers: Layers of each stage.
        n_layers: Layers of the model.
        responses: Of each stage; two of the first stage, one for each way to freeze it.
        probes: Of stages in the middle with 1 layer and with more, to price a layer.
        peak_bytes: The most that the device's allocator held, by stage; -1 where it tells none.
        n_processors: How many ranks of a run on this host would compute at once; None if each has
            a device, or cores, of its own.
    """

    order: ScheduleOrder
    layers: tuple[int, ...]
    n_layers: int
    responses: tuple[Response, ...]
    probes: tuple[Response, Response]
    peak_bytes: tuple[int, ...]
    n_processors: float | None = None


def profile_stages(
    job_config: JobConfig, repeats: Repeats, report: Callable[[Response], None]
) -> Profile:
    """Measure every stage, and what a layer adds to one.

    Args:
        job_config: The configuration of a run; its data and weights are not read.
        repeats: How often to measure.
        report: Called with each response as it is known.

    Raises:
        ValueError: If the configuration is of a kind that is not covered, or its keys contradict
            each other; all reasons are named.
    """
    reasons = list(not_covered(job_config))
    if reasons:
        raise ValueError("; ".join(reasons))
    spec = build_train_spec(get_train_spec(job_config.model.name), job_config)
    model_args: Any = spec.model_args[job_config.model.flavor]
    if reasons := list(model_not_covered(job_config, model_args)):
        raise ValueError("; ".join(reasons))
    model_args.update_from_config(job_config)
    modules = stage_modules(job_config, model_args.n_layers)
    order = pipeline_order(job_config, model_args.n_layers)
    if order.n_stages != len(modules):
        raise ValueError(
            f"the schedule has {order.n_stages} stages and the model is cut into {len(modules)}"
        )
    splits = _backwards(job_config, order)
    with _quiet_process(job_config):
        bench = _Bench(job_config, spec, model_args, repeats, splits, report)
        responses: list[Response] = []
        peaks: list[int] = []
        for stage, names in enumerate(modules):
            measured, peak_bytes = bench.measure(stage, names, len(modules))
            responses += measured
            peaks.append(peak_bytes)
        layers = count_layers(modules)
        middle = [r for r in responses if r.stage in range(1, len(modules) - 1) and r.n_layers > 1]
        many = middle[0] if middle else bench.probe(max(2, *layers))
        probes = (bench.probe(1), many)
        n_processors = None
        if titan_tools.device_type == "cpu":
            n_processors = shared_cores(order.n_ranks, torch.get_num_threads())
    return Profile(
        order,
        layers,
        model_args.n_layers,
        tuple(responses),
        probes,
        tuple(peaks),
        n_processors,
    )


def _backwards(config: JobConfig, order: ScheduleOrder) -> tuple[bool, ...]:
    """Return which backwards to measure: full (False), and split (True) where that works."""
    kinds = {action.kind for row in order.ranks for action in row}
    if config.activation_checkpoint.mode == "none":
        return (False, True)
    if ActionKind.WEIGHT_BACKWARD in kinds:
        raise ValueError(
            f"activation_checkpoint.mode is {config.activation_checkpoint.mode!r}; torch cannot "
            f"split the backward of {config.parallelism.pipeline_parallel_schedule} through "
            'recomputed layers, so it must be "none"'
        )
    return (False,)


@contextmanager
def _quiet_process(config: JobConfig) -> Iterator[None]:
    """Give this process a group of its own, and the threads that a rank would have."""
    n_threads = torch.get_num_threads()
    if titan_tools.device_type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        # As run_train.sh does for a host that has all ranks.
        n_ranks = config.parallelism.pipeline_parallel_degree
        torch.set_num_threads(max(1, int(usable_cores()) // n_ranks))
    alone = not dist.is_initialized()
    if alone:
        # No message is ever sent: all stages are in this process.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gc.collect()
    gc.disable()  # as the trainer does
    try:
        yield
    finally:
        gc.enable()
        if alone:
            dist.destroy_process_group()
        torch.set_num_threads(n_threads)


class _Place:
    """Stands in for the device mesh of a pipeline with one stage a rank, seen from one rank."""

    def __init__(self, stage: int, n_stages: int) -> None:
        self._stage, self._n_stages = stage, n_stages

    def get_local_rank(self) -> int:
        return self._stage

    def size(self) -> int:
        return self._n_stages

    def get_group(self, name: str) -> None:
        """Return None, which torch takes for the default group."""


class _Bench:
    """Builds stages and measures them, one at a time."""

    def __init__(
        self,
        config: JobConfig,
        spec: TrainSpec,
        model_args: Any,
        repeats: Repeats,
        splits: Sequence[bool],
        report: Callable[[Response], None],
    ) -> None:
        self._config = config
        self._spec = spec
        self._args = model_args
        self._repeats = repeats
        self._splits = splits
        self._report = report
        self._dims = ParallelDims(
            dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1
        )
        self._device = torch.device(
            titan_tools.device_type, titan_tools.device_module.current_device()
        )
        titan_dist.set_determinism(self._dims, self._device, config.debug, [])
        self._dtype = TORCH_DTYPE_MAP[config.training.dtype]
        with torch.device("meta"), titan_tools.set_default_dtype(self._dtype):
            self._model = spec.model_cls(model_args)
        build_model_converters(config, self._dims).convert(self._model)
        self._loss_fn = spec.build_loss_fn(config, parallel_dims=self._dims)

    def measure(self, stage: int, names: list[str], n_stages: int) -> tuple[list[Response], int]:
        """Measure a stage: the first one both ways; return the peak of memory beside."""
        is_first, is_last = stage == 0, stage == n_stages - 1
        lone = self._build(names, is_first=is_first, is_last=is_last)
        (n_layers,) = count_layers([names])
        responses = []
        for mode in (ALL_OR_NOTHING, KEEP_CHAIN) if is_first else (None,):
            if mode == KEEP_CHAIN:
                lone.attach(keep_chain=True)
            responses.append(self._respond(lone, stage, n_layers, mode))
            self._report(responses[-1])
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
        self._report(response)
        del lone
        self._let_go()
        return response

    def _build(self, names: list[str], *, is_first: bool, is_last: bool) -> LoneStage:
        """Cut the stage with these modules out of the model, as upstream does, and fill it."""
        config = self._config
        place = 0 if is_first else 1
        modules = [names if i == place else [] for i in range(place + (1 if is_last else 2))]
        _, (part,) = titan_pipeline.pipeline_module_split(
            self._model, cast(Any, _Place(place, len(modules))), "1F1B", self._device, modules
        )
        part = self._spec.parallelize_fn(part, self._dims, config)
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
        shape = (rows_of_microbatch(self._config), self._config.training.seq_len)
        tokens, labels = (
            torch.randint(self._args.vocab_size, shape, device=self._device) for _ in range(2)
        )
        return Microbatch(tokens, labels, self._args.dim, self._dtype)

    def _respond(
        self, lone: LoneStage, stage: int | None, n_layers: int, mode: str | None
    ) -> Response:
        """Run every ratio in turns, so that whatever drifts hits all of them."""
        repeats = self._repeats
        # A mask of all or nothing has no ratio in between.
        ratios = (0.0, 1.0) if mode == ALL_OR_NOTHING else repeats.ratios
        ran: list[tuple[bool, float, float]] = []
        for number in range(repeats.cold + repeats.kept):
            for split in self._splits:
                for i, ratio in enumerate(ratios):
                    rng = mask_rng(self._config.freezing.seed, number, i, 0, stage or 0)
                    share = lone.run(draw_uniform(lone.table, ratio, rng), split=split)
                    ran.append((split, ratio, share))
        n_cold = repeats.cold * len(self._splits) * len(ratios)
        passes = list(zip(ran, lone.take_times(), strict=True))[n_cold:]
        curves = {}
        for split in self._splits:
            kind = ActionKind.WEIGHT_BACKWARD if split else ActionKind.FULL_BACKWARD
            curves[kind] = tuple(
                Point(
                    ratio,
                    tuple(share for (s, r, share), _ in passes if (s, r) == (split, ratio)),
                    tuple(times[kind] for (s, r, _), times in passes if (s, r) == (split, ratio)),
                )
                for ratio in ratios
            )
        return Response(
            stage=stage,
            n_layers=n_layers,
            first_stage=mode,
            forward_ms=tuple(times[ActionKind.FORWARD] for _, times in passes),
            input_ms=tuple(
                times[ActionKind.INPUT_BACKWARD] for (split, _, _), times in passes if split
            ),
            curves=curves,
        )

    def _let_go(self) -> None:
        """Give back the memory of a stage that nobody holds any more."""
        gc.collect()
        titan_tools.device_module.empty_cache()
