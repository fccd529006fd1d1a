"""Every upstream behaviour changed by this fork, with its reason.

TorchTitan 0.2.2 is used as installed; changes of wrong or missing behaviour for pipeline-parallel
training on supported machines stand here and nowhere else. A test fails without its change, and so
shows when upstream no longer needs the change; ``docs/upstream.md`` names all tests.

Patches of module attributes are made by :func:`install`, once, before a trainer is built. The rest
are functions called by the trainer and the train spec.
"""

import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import torch
import torchtitan.components.checkpoint as titan_checkpoint
import torchtitan.components.metrics as titan_metrics
import torchtitan.distributed.utils as titan_dist
import torchtitan.tools.utils as titan_tools
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.config import Optimizer as OptimizerConfig
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from timelyfreeze.cli import overlay
from timelyfreeze.runtime import forward_only, places_stages_in_v
from torchtitan.checkpoints.manager import SafeCheckpointManager
from torchtitan.hf.decoder import Decoder
from torchtitan.hf.lean import compute_in
from torchtitan.upstream.cpu_device import CpuDevice

# NVIDIA RTX A6000 datasheet: 309.7 TFLOP/s bf16 with sparsity, half of it dense.
A6000_PEAK_FLOPS = 154.8e12

_installed = False


def install() -> None:
    """Apply all attribute patches; idempotent."""
    global _installed
    if _installed:
        return
    _installed = True
    overlay.install()  # transformers import torchvision
    if not torch.accelerator.is_available():
        # Upstream falls back to "cuda" on any machine (tools/utils.py) and reads its memory
        # statistics from the CUDA allocator.
        _replace("device_type", titan_tools.device_type, "cpu")
        _replace("device_module", titan_tools.device_module, CpuDevice)
    logger.addFilter(is_worth_telling)
    # Importing torchao warns of kernels for other machines, and of its own use of torch.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    _patch(titan_dist, "clip_grad_norm_", _clip_on_device)
    _patch(titan_dist, "maybe_enable_amp", _tell_precision)
    _patch(titan_tools, "get_peak_flops", _peak_flops)
    _patch(titan_metrics, "_get_metrics_rank", _metrics_rank)
    _replace("CheckpointManager", titan_checkpoint.CheckpointManager, SafeCheckpointManager)
    # Reported once by our own launcher, which knows the rank; upstream's advice points at its own
    # script.
    _patch(titan_metrics, "ensure_pp_loss_visible", lambda *args: None)


def _patch(module: Any, name: str, new: Callable[..., Any]) -> None:
    """Replace ``module.name``, also where imported by name; ``new`` gets the original too."""
    original = getattr(module, name)

    @wraps(new)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return new(original, *args, **kwargs)

    _replace(name, original, patched)


def _replace(name: str, original: Any, new: Any) -> None:
    """Replace ``original`` under ``name`` in every module of upstream."""
    for module in list(sys.modules.values()):
        is_upstream = getattr(module, "__name__", "").startswith("torchtitan")
        if is_upstream and getattr(module, name, None) is original:
            setattr(module, name, new)


# -- devices ---------------------------------------------------------------------------------------


def reduce_by_sum_on_cpu(module: nn.Module) -> nn.Module:
    """Make FSDP's gradient reduction a sum known to gloo; the result is the same.

    Upstream asks for a sum with a factor of 1, passed on by FSDP2 as an operation of NCCL alone.
    """
    if titan_tools.device_type == "cpu":
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)
    return module


def _peak_flops(upstream: Callable[[str], float], device_name: str) -> float:
    """Give the A6000 its own peak, and a CPU none; upstream takes an A100's for both."""
    if titan_tools.device_type == "cpu":
        return float("nan")
    return A6000_PEAK_FLOPS if "A6000" in device_name else upstream(device_name)


def _clip_on_device(
    upstream: Callable[..., Tensor],
    parameters: Any,
    max_norm: float,
    *args: Any,
    pp_mesh: Any = None,
    **kwargs: Any,
) -> Tensor:
    """Let ranks without gradients, and all emulated ranks, take part in the gradient norm.

    In a step with everything frozen a rank has no gradients; torch's norm of nothing is a zero on
    the CPU, which NCCL cannot reduce over the pipeline. Factory functions under a default device
    put the zero beside the parameters.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    device = parameters[0].device if parameters else torch.device(titan_tools.device_type)
    with torch.device(device):
        if hasattr(pp_mesh, "clip_grad_norm_"):  # the mesh of emulated ranks
            return pp_mesh.clip_grad_norm_(parameters, max_norm, foreach=kwargs.get("foreach"))
        return upstream(parameters, max_norm, *args, pp_mesh=pp_mesh, **kwargs)


# -- gradients under pipeline parallelism ----------------------------------------------------------


class PipelineLoss:
    """A sum loss divided by the step's number of target tokens before backpropagation.

    Upstream back-propagates the raw sum under pipeline parallelism and divides only the logged
    value (issue #2972): gradients come out larger by the number of tokens, which clipping then
    hides. Outside :meth:`divided_by` (in validation, which divides by itself) the loss is the plain
    sum. With ``of_learned`` the last stage may compute the sum itself, of learned tokens alone.
    """

    def __init__(self, loss_fn: Callable[..., Tensor], *, of_learned: bool = False) -> None:
        self._loss_fn = loss_fn
        self.of_learned = of_learned
        self._n_tokens: Tensor | float = 1.0

    @contextmanager
    def divided_by(self, n_tokens: Tensor | float) -> Iterator[None]:
        """Divide every loss computed inside by ``n_tokens``."""
        self._n_tokens = n_tokens
        try:
            yield
        finally:
            self._n_tokens = 1.0

    def __call__(self, prediction: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        """Return the sum loss of a microbatch over the number of tokens of the step."""
        is_summed = self.of_learned and prediction.ndim == 0
        total = prediction if is_summed else self._loss_fn(prediction, labels, **kwargs)
        return total / self._n_tokens


def autocast_stages(
    model_parts: list[nn.Module],
    parallel_dims: ParallelDims,
    job_config: JobConfig,
    device: torch.device,
) -> None:
    """Give ``training.mixed_precision_param`` its meaning under pipeline parallelism without FSDP.

    Upstream leaves mixed precision to FSDP and turns it off, with a warning, when pipeline or
    tensor parallelism runs without it: fp32 on GPUs bought for bf16. Here a stage of a language
    model computes in 16 bits throughout, as under FSDP; other forwards run under autocast, as in
    upstream for DDP and single devices.
    """
    dtype = TORCH_DTYPE_MAP[job_config.training.mixed_precision_param]
    if parallel_dims.fsdp_enabled or dtype == torch.float32:
        return
    for part in model_parts:
        # Converters have layers of their own, tensor parallelism has weights in parts.
        if isinstance(part, Decoder) and not (
            job_config.model.converters or parallel_dims.tp_enabled
        ):
            compute_in(part, dtype)
        else:
            part.forward = _autocast(part.forward, device.type, dtype)


def _tell_precision(
    upstream: Callable[..., Any], parallel_dims: ParallelDims, dtype: str, device_type: str
) -> Any:
    """Log the stages' precision, where upstream logs that autocast is off."""
    if parallel_dims.fsdp_enabled or not parallel_dims.pp_enabled:
        return upstream(parallel_dims, dtype, device_type)
    logger.info(f"Stages compute in {dtype}")
    return nullcontext()


def _autocast(
    forward: Callable[..., Any], device_type: str, dtype: torch.dtype
) -> Callable[..., Any]:
    @wraps(forward)
    def cast_forward(*args: Any, **kwargs: Any) -> Any:
        # A weight that is cast where no gradient is wanted must not be handed to whom one is.
        with torch.autocast(device_type, dtype=dtype, cache_enabled=torch.is_grad_enabled()):
            return forward(*args, **kwargs)

    return cast_forward


@contextmanager
def one_cast_for_all() -> Iterator[None]:
    """Cast each weight once for all microbatches of a pipeline batch.

    Autocast remembers casts until its outermost context ends, otherwise a forward's. Microbatches
    would then cast all weights again and keep copies until their backward: for GPipe as many copies
    as microbatches.
    """
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def copy_without_wait(tensors: Iterable[Tensor]) -> None:
    """Have ``to`` of tensors in pinned memory return at once: upstream waits for copies.

    A stream of the device copies before it computes, and torch keeps the memory until then.
    """
    for tensor in tensors:
        if tensor.is_pinned():
            # Of a tensor that shares the memory: its own method would hold itself, a circle.
            tensor.to = partial(tensor.detach().to, non_blocking=True)


def evaluate_forwards_alone(schedule: Any) -> None:
    """Let ``schedule.eval`` run under every schedule, and keep no outputs.

    torch fails where neighbouring stages share a rank (ZBVZeroBubble, DualPipeV). Torch also keeps
    and joins the last stage's outputs of all microbatches, with more memory than training for a
    large vocabulary; upstream's validator reads the losses alone.
    """
    evaluate = schedule.eval

    def evaluate_forwards(*args: Any, **kwargs: Any) -> Any:
        with forward_only(schedule):
            return evaluate(*args, **{"return_outputs": False, **kwargs})

    schedule.eval = evaluate_forwards


# -- model and metrics -----------------------------------------------------------------------------


# What upstream says that is not so of our runs (schedule and mesh of an emulation's stand-in), or
# that settings.json has too and that helps nobody who waits for step 1.
_NOT_TOLD = re.compile(
    r"torchtitan version|Starting job: |ENV\[|\[GC\] |Building (\S+ \S+with|device mesh) "
    r"|Successfully created meshes|Using pipeline schedule |PP rank \d+ is building |CPU capacity"
    r"|Peak FLOPS used|\w+ memory usage for model|Synchronizing and adjusting timeout"
    r"|Sleeping 2 seconds|Process group destroyed|loading HF safetensors|Finished loading the ch"
)
_OF_ALL_RANKS = re.compile(r"Warmup steps \(")  # that each rank warns of


def is_worth_telling(record: logging.LogRecord) -> bool:
    """Return whether a line of upstream's is true of our runs and short: at most 12 before step 1.

    A filter of upstream's logger. Its errors, and all with the level DEBUG, pass.
    """
    is_debugged = logger.isEnabledFor(logging.DEBUG) or record.levelno >= logging.ERROR
    told = record.getMessage()
    is_again = os.environ.get("RANK", "0") != "0" and _OF_ALL_RANKS.match(told)
    return is_debugged or not (_NOT_TOLD.match(told) or is_again)


@contextmanager
def lines_count(unit: str, note: str = "") -> Iterator[None]:
    """Let upstream's lines name the unit of throughput, and omissions, if not all tokens.

    Upstream's "tps" counts a batch's labels; for a classifier, pictures. An unknown MFU is left
    out.
    """
    name = "tps" if unit == "tokens" else f"{unit}/s"

    def say(record: logging.LogRecord) -> bool:
        told = re.sub(r" *mfu: nan%", "", str(record.msg))
        record.msg = re.sub(r"tps: +([\d,]+)", rf"{name}: \1{note}", told)
        return True

    logger.addFilter(say)
    try:
        yield
    finally:
        logger.removeFilter(say)


@contextmanager
def without_last_pause() -> Iterator[None]:
    """Let upstream's training loop end at once: it waits 2 s for ranks, which here go on."""
    titan_train: Any = sys.modules["torchtitan.train"]  # imported after the patches
    titan_train.time, clock = SimpleNamespace(sleep=lambda seconds: None), titan_train.time
    try:
        yield
    finally:
        titan_train.time = clock


def _metrics_rank(
    upstream: Callable[..., int], parallel_dims: ParallelDims, job_config: JobConfig
) -> int:
    """Find the loss on rank 0 for every schedule folding the pipeline back."""
    schedule = job_config.parallelism.pipeline_parallel_schedule
    if parallel_dims.pp_enabled and places_stages_in_v(schedule):
        return 0
    return upstream(parallel_dims, job_config)


SGD = "SGD"


class SgdContainer(OptimizersContainer[torch.optim.SGD]):
    """SGD with momentum for each part, with state to save before every tensor has any."""

    def state_dict(self) -> dict[str, Any]:
        """Return the momentum of every tensor, zero if never updated.

        Torch would replace a missing state by a step of zero gradients, which leaves weight decay
        in the momentum.
        """
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"] if group["momentum"] else ():
                    state = optimizer.state[parameter]
                    if state.get("momentum_buffer") is None:
                        state["momentum_buffer"] = torch.zeros_like(parameter)
        return super().state_dict()


def build_sgd(
    model_parts: list[nn.Module], config: OptimizerConfig, *args: Any, **kwargs: Any
) -> SgdContainer:
    """Return SGD for all parts, with momentum ``beta1``; ``beta2`` and ``eps`` are unused."""
    settings = {
        "lr": config.lr,
        "momentum": config.beta1,
        "weight_decay": config.weight_decay,
        "fused": config.implementation == "fused",
        "foreach": config.implementation == "foreach",
    }
    return SgdContainer(model_parts, torch.optim.SGD, settings)
