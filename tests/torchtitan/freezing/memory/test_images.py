"""Memory of image classifiers, against what autograd keeps of real tensors."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchtitan.components.optimizer import build_optimizers
from torchtitan.distributed import ParallelDims

from tests.torchtitan.helpers.image_models import KINDS, N_LAYERS, args_of, some_pictures
from timelyfreeze.whatif.rank_memory import ModelBytes
from torchtitan.freezing.launch import read_config
from torchtitan.freezing.memory.estimate import How, block_bytes, estimate_memory, model_bytes
from torchtitan.freezing.partition.cut import partition_line
from torchtitan.settings import JobConfig, count_layers, stage_modules
from torchtitan.upstream.fixes import build_sgd
from torchtitan.vision.model import VisionModel

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[4]


def counted(kind: str, n_pictures: int, *, recompute: bool = False) -> ModelBytes:
    return block_bytes(args_of(kind), how=How(n_pictures, torch.float32, recompute=recompute))


def kept_of(module: nn.Module, enters: Tensor) -> tuple[int, Tensor]:
    """What autograd saves of a real forward, each storage once, without the weights."""
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = module(enters)
    sizes = {place: t.untyped_storage().nbytes() for place, t in saved.items()}
    return sum(n for place, n in sizes.items() if place not in weights), out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_pictures", [1, 3])
def test_blocks_keep_what_autograd_saves(kind: str, n_pictures: int) -> None:
    model, found = VisionModel(args_of(kind)), counted(kind, n_pictures)
    _, hidden = kept_of(model.tok_embeddings, some_pictures(n_pictures))
    assert found.outputs[0] == hidden.nbytes
    for number, block in enumerate(model.layers.values()):
        kept, hidden = kept_of(block, hidden.detach().clone().requires_grad_())
        assert found.blocks[number].kept == kept, number
        assert found.outputs[number + 1] == hidden.nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_model(kind: str) -> None:
    model, found = VisionModel(args_of(kind)), counted(kind, 2)
    parts = [found.embedding, *found.blocks, found.norm, found.head]
    assert sum(part.weights for part in parts) == 4 * sum(p.numel() for p in model.parameters())
    assert len(found.blocks) == N_LAYERS
    if kind == "convnextv2":
        assert found.blocks[0].kept > 2 * found.blocks[-1].kept
        assert found.blocks[0].weights < found.blocks[-1].weights
        assert len(set(found.outputs)) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_run_again_keep_their_input(kind: str) -> None:
    again, whole = counted(kind, 2, recompute=True), counted(kind, 2)
    assert [block.kept for block in again.blocks] == list(again.outputs[:-1])
    assert again.recomputed == max(block.kept for block in whole.blocks)


def read(*arguments: str) -> JobConfig:
    path = ROOT / "train_configs/convnextv2_cifar10.toml"
    keys = ("--training.local_batch_size=32", "--emulation.no_enable", *arguments)
    return read_config([f"--job.config_file={path}", *keys])


def test_ranks_hold_what_their_parts_do() -> None:
    """By hand: of 1F1B a rank keeps as many microbatches as there are ranks from it on."""
    job_config = read()
    model, ranks = model_bytes(job_config), estimate_memory(job_config)
    assert model.blocks
    ends = list(itertools.accumulate(count_layers(stage_modules(job_config, 12))))
    for number, (start, stop) in enumerate(itertools.pairwise((0, *ends))):
        parts = list(model.blocks[start:stop])
        parts += [model.embedding] if number == 0 else []
        parts += [model.norm, model.head] if number == 3 else []
        rank, weights = ranks[number], sum(part.weights for part in parts)
        assert (rank.parameters, rank.gradients, rank.optimizer) == (weights, weights, 2 * weights)
        sent = 0 if number == 3 else model.outputs[stop]
        received = 0 if number == 0 else model.outputs[start]
        assert rank.activations == (4 - number) * (sum(part.kept for part in parts) + sent)
        assert rank.messages == 4 * (sent + received)


@pytest.mark.parametrize(
    ("keys", "n_states"),
    [(["AdamW"], 2), (["SGD"], 1), (["SGD", "--optimizer.beta1=0.0"], 0)],
)
def test_an_optimizer_holds_as_much_as_it_saves(keys: list[str], n_states: int) -> None:
    """Counted of a real optimizer after a step, without its counts of steps."""
    job_config = read("--optimizer.name=" + keys[0], *keys[1:])
    part = nn.Linear(3, 2)
    if keys[0] == "SGD":
        optimizers: Any = build_sgd([part], job_config.optimizer)
    else:
        optimizers = build_optimizers(
            [part], job_config.optimizer, ParallelDims(1, 1, 1, 1, 1, 1, 1, 1)
        )
    part(torch.ones(1, 3)).sum().backward()
    optimizers.step()
    states = [state for one in optimizers for state in one.state.values()]
    n_held = sum(t.numel() for s in states for t in s.values() if isinstance(t, Tensor) and t.dim())
    assert n_held == n_states * sum(p.numel() for p in part.parameters())
    for rank in estimate_memory(job_config):
        assert rank.optimizer == n_states * rank.gradients


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_no_cut_has_a_smaller_rank_by_memory(schedule: str) -> None:
    keys = (f"--parallelism.pipeline_parallel_schedule={schedule}",
            "--parallelism.pipeline_parallel_degree=2")  # fmt: skip
    job_config = read("--parallelism.partition=memory", *keys)
    (first, _) = count_layers(job_config.parallelism.module_fqns_per_model_part or [])

    def fullest(n: int) -> int:
        names = [f"layers.{i}" for i in range(12)]
        job_config.parallelism.module_fqns_per_model_part = [
            ["tok_embeddings", *names[:n]], [*names[n:], "norm", "output"],
        ]  # fmt: skip
        return max(rank.total for rank in estimate_memory(job_config))

    told = partition_line(job_config)
    assert told is not None
    assert "memory of each rank" in told
    assert fullest(first) == min(map(fullest, range(13)))
