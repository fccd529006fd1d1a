"""Gradients of one process that knows nothing of pipelines, shards or masked backwards."""

from contextlib import nullcontext

import pytest
import torch
from hybrids import N_MICROBATCHES
from run_scenarios import FLAVORS, fix_weights
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer

IGNORED = -100


def rows_of(ranks, kind):
    """Return the inputs and labels of each replica in the last step.

    Processes are numbered with the pipeline outermost and tensor parallelism innermost.
    """
    n_of_stage = kind.n_replicas * kind.n_tp
    replicas = [ranks[r * kind.n_tp] for r in range(kind.n_replicas)]
    for place, seen in enumerate(ranks):
        same = replicas[place % n_of_stage // kind.n_tp]
        assert torch.equal(seen["batches"][-1], same["batches"][-1])
    return [(seen["batches"][-1], seen["labels"][-1]) for seen in replicas]


def frozen_in(ranks):
    """Return {name: whether it was frozen, by microbatch} of the last step, the same everywhere."""
    frozen = {}
    for seen in ranks:
        for step, stage, masks in seen["masks"]:
            if step != seen["step"]:
                continue
            for place, name in enumerate(seen["names"][stage]):
                mask = [bool(m in masks and masks[m][place]) for m in range(N_MICROBATCHES)]
                assert frozen.setdefault(name, mask) == mask, f"ranks froze {name} differently"
    return frozen


def model_of(seq_len):
    """Return the whole model as ``fix_weights`` leaves it."""
    model = Transformer(TransformerModelArgs(**FLAVORS["short"], max_seq_len=seq_len))
    fix_weights([model])
    return model


def in_float8(model):
    """Let linear layers multiply in float8, scaled by tensor and emulated."""
    float8 = pytest.importorskip("torchao.float8")
    config = float8.Float8LinearConfig(emulate=True)
    float8.convert_to_float8_training(model, config=config)


def gradients_by_microbatch(weights, replicas, precision, *, cast_weights=False, model=None):
    """Return {name: gradients, shape [n_microbatches, ...]} of the mean loss over all tokens.

    Nothing is frozen: each microbatch, the rows of all replicas in it, has its own gradient. The
    head gets learned tokens alone, so that its products round, and float8 scales, as a run's do.

    Args:
        weights: {name: tensor} of the whole model.
        replicas: Inputs and labels of each replica, shape [n_rows, seq_len].
        precision: One of those that ``hybrids.py`` names.
        cast_weights: Whether all weights are cast to bf16, as by FSDP and in 16-bit stages, or
            autocast decides, as with tensor parallelism alone.
        model: The whole model; that of ``model_of`` if None.
    """
    model = model or model_of(replicas[0][0].shape[1])
    if precision == "float8":
        in_float8(model)
    is_low = precision == "bf16"
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    assert leaves.keys() == dict(model.named_parameters()).keys()
    casts_all, casts_some = is_low and cast_weights, is_low and not cast_weights
    used = {n: leaf.to(torch.bfloat16) if casts_all else leaf for n, leaf in leaves.items()}
    n_tokens = sum(int((labels != IGNORED).sum()) for _, labels in replicas)
    sums = {name: torch.zeros(N_MICROBATCHES, *leaf.shape) for name, leaf in leaves.items()}
    hook = model.norm.register_forward_pre_hook(lambda _, given: (given[0][targets != IGNORED],))
    for inputs, labels in replicas:
        pieces = zip(inputs.chunk(N_MICROBATCHES), labels.chunk(N_MICROBATCHES), strict=True)
        for microbatch, (rows, targets) in enumerate(pieces):
            with torch.autocast("cpu", torch.bfloat16) if casts_some else nullcontext():
                logits = functional_call(model, used, (rows,))
            loss = cross_entropy(logits.float(), targets[targets != IGNORED], reduction="sum")
            gradients = torch.autograd.grad(
                loss / n_tokens, list(leaves.values()), retain_graph=True
            )
            for name, gradient in zip(leaves, gradients, strict=True):
                sums[name][microbatch] += gradient
    hook.remove()
    return sums


def masked_sum(by_microbatch, frozen):
    """Return the gradient of the microbatches that are not ``frozen``; None if all are."""
    live = [gradient for gradient, f in zip(by_microbatch, frozen, strict=True) if not f]
    return sum(live) if live else None
