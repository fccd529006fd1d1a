"""Each change to upstream, beside what upstream does without it.

``fresh`` runs an upstream file again under another name, so that its own behaviour can be seen in a
process where the fixes are installed. A test that finds upstream mended fails: the fix can go.
"""

import importlib
import importlib.util
import inspect
import math
import subprocess
import sys
from contextlib import nullcontext
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchtitan.components.metrics as titan_metrics
import torchtitan.distributed.utils as titan_dist
import torchtitan.tools.utils as titan_tools
import torchtitan.train as titan_train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.schedules import get_schedule_class
from torchtitan.distributed import ParallelDims

from tests.timelyfreeze.helpers.stages import (
    N_MICROBATCHES,
    Pipeline,
    make_batch,
    make_modules,
    process_group,
    sum_loss,
)
from torchtitan.settings.job_config import JobConfig
from torchtitan.upstream import fixes as upstream_fixes
from torchtitan.upstream.cpu_device import CpuDevice
from torchtitan.upstream.fixes import PipelineLoss, evaluate_forwards_alone

on_cpu_only = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="this machine has an accelerator"
)


@pytest.fixture(autouse=True, scope="module")
def _installed() -> None:
    upstream_fixes.install()


def fresh(module: ModuleType) -> ModuleType:
    """The upstream module as its file defines it, untouched by ``install``."""
    spec = importlib.util.spec_from_file_location(f"fresh_{module.__name__}", module.__file__)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def upstream_modules() -> list[ModuleType]:
    return [m for name, m in list(sys.modules.items()) if name.startswith("torchtitan.")]


# -- installing ------------------------------------------------------------------------------------

PATCHED = [
    (titan_dist, "clip_grad_norm_"),
    (titan_tools, "get_peak_flops"),
    (titan_metrics, "_get_metrics_rank"),
    (titan_metrics, "ensure_pp_loss_visible"),
]


@pytest.mark.parametrize(("module", "name"), PATCHED, ids=[name for _, name in PATCHED])
def test_a_patched_function_is_ours_and_upstream_still_has_it(module: Any, name: str) -> None:
    assert inspect.getmodule(getattr(module, name)) is upstream_fixes
    original = inspect.unwrap(getattr(fresh(module), name))
    assert inspect.getsourcefile(original) == module.__file__


def test_installing_twice_is_harmless() -> None:
    before = [getattr(module, name) for module, name in PATCHED]
    upstream_fixes.install()
    assert [getattr(module, name) for module, name in PATCHED] == before


# -- devices ---------------------------------------------------------------------------------------


@on_cpu_only
def test_upstream_still_takes_any_machine_for_one_with_cuda() -> None:
    """Guards ``tools/utils.py``: ``_get_available_device_type() or "cuda"``."""
    device_type, device_module = fresh(titan_tools).get_device_info()
    assert (device_type, device_module) == ("cuda", torch.cuda)


@on_cpu_only
def test_every_module_of_upstream_sees_the_cpu() -> None:
    """Modules that were loaded before the patch, and one loaded after it."""
    sys.modules.pop("torchtitan.tools.profiling", None)
    importlib.import_module("torchtitan.tools.profiling")
    seen = set()
    for module in upstream_modules():
        if hasattr(module, "device_type"):
            assert module.device_type == "cpu", module.__name__
            seen.add(module.__name__)
        if hasattr(module, "device_module"):
            assert module.device_module is CpuDevice, module.__name__
            seen.add(module.__name__)
    assert seen >= {
        "torchtitan.tools.utils",
        "torchtitan.distributed.utils",
        "torchtitan.distributed.parallel_dims",
        "torchtitan.components.metrics",
        "torchtitan.tools.profiling",
    }


@on_cpu_only
def test_upstreams_memory_monitor_works_on_the_cpu() -> None:
    monitor = titan_metrics.build_device_memory_monitor()
    assert monitor.device_name == CpuDevice.get_device_name()
    stats = monitor.get_peak_stats()
    assert 0 < stats.max_active_gib < monitor.device_capacity_gib
    assert 0 < stats.max_active_pct < 100
    assert (stats.num_alloc_retries, stats.num_ooms) == (0, 0)
    monitor.reset_peak_stats()


@on_cpu_only
def test_time_limits_of_process_groups_can_be_set_on_gloo() -> None:
    with process_group():
        mesh = init_device_mesh("cpu", (1,))
        dims = SimpleNamespace(get_all_one_dimensional_meshes=lambda: {"pp": mesh})
        titan_dist.set_pg_timeouts(timedelta(seconds=77), dims)
        for group in (mesh.get_group(), dist.group.WORLD):
            backend = group._get_backend(torch.device("cpu"))
            assert backend.options._timeout == timedelta(seconds=77)


@pytest.fixture
def _no_lspci(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream believes lspci more than the name it is given."""

    def run(*args: Any, **kwargs: Any) -> Any:
        raise FileNotFoundError("lspci")

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.usefixtures("_no_lspci")
def test_an_a6000_has_its_own_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards ``get_peak_flops``, which takes an A6000 for an A100 (312 TFLOP/s).

    The data sheet has 309.7 TFLOP/s for bf16 with sparsity, which is twice the dense metric.
    """
    monkeypatch.setattr(titan_tools, "device_type", "cuda")
    upstream = fresh(titan_tools).get_peak_flops
    assert upstream("NVIDIA RTX A6000") == 312e12
    assert titan_tools.get_peak_flops("NVIDIA RTX A6000") == pytest.approx(309.7e12 / 2, rel=1e-3)
    for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA B200"):
        assert titan_tools.get_peak_flops(name) == upstream(name)


@pytest.mark.usefixtures("_no_lspci")
def test_a_cpu_has_no_mfu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards ``get_peak_flops``, which takes a CPU for an A100 too."""
    from torchtitan.freezing.report.tensorboard import RunTensorBoard

    monkeypatch.setattr(titan_tools, "device_type", "cpu")
    name = CpuDevice.get_device_name()
    assert fresh(titan_tools).get_peak_flops(name) == 312e12
    peak = titan_tools.get_peak_flops(name)
    assert math.isnan(peak)
    written: dict[str, float] = {}
    board = RunTensorBoard.__new__(RunTensorBoard)
    board.tag = None
    board.run, board._unit = SimpleNamespace(writing=nullcontext), "tokens"
    board.writer = SimpleNamespace(add_scalar=lambda tag, value, step: written.update({tag: value}))
    board.log({"mfu(%)": 100 * 1e12 / peak, "tps": 3.0, "steps": 4}, step=1)
    assert written == {"tps": 3.0, "steps": 4}


# -- gradient norm ---------------------------------------------------------------------------------


def test_upstream_still_waits_at_the_end_of_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(titan_train.time, "sleep", waits.append)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    trainer: Any = SimpleNamespace(
        job_config=JobConfig(), checkpointer=SimpleNamespace(load=lambda step: None), step=0,
        dataloader=[], batch_generator=iter, should_continue_training=lambda: False,
    )  # fmt: skip
    with upstream_fixes.without_last_pause():
        titan_train.Trainer.train(trainer)
    assert not waits
    titan_train.Trainer.train(trainer)
    assert waits == [2]


def test_the_norm_of_no_gradients_lies_where_the_parameters_are() -> None:
    """Guards ``clip_grad_norm_``: NCCL cannot reduce the CPU zero that upstream makes.

    The meta device stands in for an accelerator.
    """
    parameters = [nn.Parameter(torch.ones(3, device="meta")) for _ in range(2)]
    assert fresh(titan_dist).clip_grad_norm_(parameters, 1.0).device.type == "cpu"
    assert titan_dist.clip_grad_norm_(parameters, 1.0).device.type == "meta"
    assert titan_dist.clip_grad_norm_(iter(parameters), 1.0).device.type == "meta"
    assert titan_dist.clip_grad_norm_(parameters[0], 1.0).device.type == "meta"


@on_cpu_only
def test_a_rank_without_parameters_has_a_norm_too() -> None:
    assert titan_dist.clip_grad_norm_([], 1.0).item() == 0.0


@pytest.mark.parametrize("as_iterator", [True, False])
def test_gradients_are_clipped_as_before(as_iterator: bool) -> None:
    torch.manual_seed(0)
    ours, plain = ([nn.Parameter(torch.zeros(4)) for _ in range(3)] for _ in range(2))
    for a, b in zip(ours[:2], plain[:2], strict=True):  # the third has no gradient
        a.grad = torch.randn(4)
        b.grad = a.grad.clone()
    norm = titan_dist.clip_grad_norm_(iter(ours) if as_iterator else ours, 0.5)
    wanted = torch.cat([p.grad for p in plain[:2]]).norm()
    torch.testing.assert_close(norm, wanted)
    for a, b in zip(ours[:2], plain[:2], strict=True):
        torch.testing.assert_close(a.grad, b.grad * 0.5 / wanted)
    assert ours[2].grad is None


# -- loss ------------------------------------------------------------------------------------------


def sum_of_squares(prediction: Tensor, labels: Tensor, factor: float = 1.0) -> Tensor:
    return factor * (prediction - labels).square().sum()


def test_the_loss_is_divided_inside_and_plain_outside() -> None:
    """Guards issue #2972: under a pipeline upstream back-propagates the sum.

    That upstream still does is seen in tests/multiprocess.
    """
    loss_fn = PipelineLoss(sum_of_squares)
    prediction, labels = torch.tensor([3.0, 5.0]), torch.tensor([1.0, 1.0])
    assert loss_fn(prediction, labels).item() == 20.0
    with loss_fn.divided_by(torch.tensor(8)):
        assert loss_fn(prediction, labels).item() == 2.5
        assert loss_fn(prediction, labels, factor=2.0).item() == 5.0
    assert loss_fn(prediction, labels).item() == 20.0


def test_gradients_are_those_of_the_mean_over_all_microbatches() -> None:
    loss_fn = PipelineLoss(sum_of_squares)
    weight = torch.tensor([2.0], requires_grad=True)
    x = torch.arange(8.0)
    with loss_fn.divided_by(8):
        for part in x.split(3):  # microbatches of different sizes
            loss_fn(weight * part, part).backward()
    (wanted,) = torch.autograd.grad((weight * x - x).square().mean(), weight)
    torch.testing.assert_close(weight.grad, wanted)


def test_an_exception_does_not_leave_the_division_behind() -> None:
    loss_fn = PipelineLoss(sum_of_squares)
    with pytest.raises(RuntimeError, match="interrupted"), loss_fn.divided_by(8):
        raise RuntimeError("interrupted")
    assert loss_fn(torch.ones(2), torch.zeros(2)).item() == 2.0


# -- metrics ---------------------------------------------------------------------------------------


@pytest.fixture
def dims() -> ParallelDims:
    """Four pipeline ranks of two replicas each."""
    return ParallelDims(dp_replicate=1, dp_shard=2, cp=1, tp=1, pp=4, ep=1, etp=1, world_size=8)


@pytest.mark.parametrize(
    ("schedule", "rank", "upstreams"),
    [
        ("1F1B", 6, 6),
        ("Interleaved1F1B", 6, 6),
        ("ZBVZeroBubble", 0, 0),
        ("zbvzerobubble", 0, 6),
        ("DualPipeV", 0, 6),
    ],
)
def test_the_loss_is_looked_for_where_the_last_stage_is(
    dims: ParallelDims, schedule: str, rank: int, upstreams: int
) -> None:
    """Guards ``_get_metrics_rank``, which knows ZBVZeroBubble alone, and that by exact spelling."""
    config = JobConfig()
    config.parallelism.pipeline_parallel_schedule = schedule
    assert titan_metrics._get_metrics_rank(dims, config) == rank
    assert fresh(titan_metrics)._get_metrics_rank(dims, config) == upstreams


def test_without_a_pipeline_rank_0_has_the_loss() -> None:
    dims = ParallelDims(dp_replicate=1, dp_shard=8, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=8)
    config = JobConfig()
    config.parallelism.pipeline_parallel_schedule = "DualPipeV"
    assert titan_metrics._get_metrics_rank(dims, config) == 0


# -- evaluation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipeV", "InterleavedZeroBubble", "GPipe"])
def test_every_schedule_evaluates_and_keeps_no_outputs(name: str) -> None:
    with process_group():
        modules = make_modules()
        chain = nn.Sequential(*modules)
        n_parts = {"GPipe": 1, "InterleavedZeroBubble": 4}.get(name, 2)
        size = 4 // n_parts
        parts = [nn.Sequential(*modules[i : i + size]) for i in range(0, 4, size)]
        pipeline = Pipeline(parts, get_schedule_class(name))
        evaluate_forwards_alone(pipeline.schedule)
        tokens, labels = make_batch()
        losses: list[Tensor] = []
        with torch.no_grad():
            assert pipeline.schedule.eval(tokens, target=labels, losses=losses) is None
            expected = [
                sum_loss(chain(rows), targets)
                for rows, targets in zip(
                    tokens.chunk(N_MICROBATCHES), labels.chunk(N_MICROBATCHES), strict=True
                )
            ]
        torch.testing.assert_close(torch.stack(losses), torch.stack(expected))
        assert all(not stage.output_chunks for stage in pipeline.stages)
