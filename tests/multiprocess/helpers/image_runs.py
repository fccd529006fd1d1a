"""Scenarios of image classifiers, and what one process has for them."""

import torch
from launcher import arguments
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from tests.torchtitan.helpers.image_models import CLASSES, SIZE, args_of
from torchtitan.vision.model import VisionModel

KINDS = ["vit", "convnextv2"]
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"]


def image_scenario(name, kind, *, more=None, **settings):
    """Return a scenario of the small model of that kind; ``more`` is of the scenario."""
    given = {
        "model__name": kind,
        "model__flavor": "tiny",
        "vision__image_size": SIZE,
        "vision__classes": CLASSES,
        "training__dataset": "images",
        "training__dataset_path": "of few_pictures.py",
        "parallelism__pipeline_parallel_degree": 4,
        "parallelism__pipeline_parallel_first_stage_less_layers": 0,
        "parallelism__pipeline_parallel_last_stage_less_layers": 0,
        **settings,
    }
    return {"name": name, "module": "few_pictures", "args": arguments(**given), **(more or {})}


def loss_of(ranks):
    (losses,) = [seen["losses"] for seen in ranks if seen["losses"][0] != -1.0]
    return losses


def gradients_by_microbatch(kind, weights, pictures, labels, n_microbatches):
    """Return {name: gradients, shape [n_microbatches, ...]} of the mean loss over all pictures."""
    model = VisionModel(args_of(kind))
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    assert leaves.keys() == dict(model.named_parameters()).keys()
    found = {name: [] for name in leaves}
    chunks = pictures.chunk(n_microbatches), labels.chunk(n_microbatches)
    for rows, targets in zip(*chunks, strict=True):
        loss = cross_entropy(functional_call(model, leaves, (rows,)), targets, reduction="sum")
        gradients = torch.autograd.grad(loss / len(pictures), list(leaves.values()))
        for name, gradient in zip(leaves, gradients, strict=True):
            found[name].append(gradient)
    return {name: torch.stack(gradients) for name, gradients in found.items()}
