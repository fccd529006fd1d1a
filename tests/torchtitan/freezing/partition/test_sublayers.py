"""Blocks cut between attention and MLP: the same model, in pieces with the same names."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.timelyfreeze.helpers.stages import LOOPED, N_MICROBATCHES, Pipeline, process_group
from tests.torchtitan.helpers.job_configs import config
from timelyfreeze.schedule import ActionKind
from torchtitan.freezing.partition.sublayers import build_with_sublayers, sublayer_sizes
from torchtitan.hf.decoder import Decoder, DecoderArgs
from torchtitan.settings import count_layers, count_sublayers, cuts_blocks, modules_of_split

# Of 8 attentions and MLPs: a block's end and another's begin, an attention alone, an MLP alone.
SPLIT = (2, 1, 1, 3, 1)


def model_of(kind: str) -> tuple[Any, Tensor]:
    torch.manual_seed(3)
    if kind == "llama3":
        args = DecoderArgs(dim=16, n_layers=4, n_heads=2, vocab_size=32, max_seq_len=8)
        model = Decoder(args)
        with torch.no_grad():
            model.init_weights()
        return model, torch.randint(32, (2, 8))
    pytest.importorskip("transformers")
    from tests.torchtitan.helpers.image_models import args_of, some_pictures
    from torchtitan.vision.model import VisionModel

    return VisionModel(args_of("vit", num_hidden_layers=4)), some_pictures(2)


def stages_of(kind: str, model: Any) -> list[Any]:
    """Stages as upstream makes them: copies that keep what is named."""

    def build(
        model: Any, dims: Any, job_config: Any, device: Any, args: Any, parallelize: Any
    ) -> list[Any]:
        stages = []
        for names in job_config.parallelism.module_fqns_per_model_part:
            stage = copy.deepcopy(model)
            kept = {k: block for k, block in stage.layers.items() if f"layers.{k}" in names}
            stage.layers = nn.ModuleDict(kept)
            for end in {"tok_embeddings", "norm", "output"} - set(names):
                setattr(stage, end, None)
            stages.append(parallelize(stage))
        return stages

    modules = modules_of_split(SPLIT, sublayers=True)
    cut: Any = config(model__name=kind, parallelism__module_fqns_per_model_part=modules)
    assert cuts_blocks(cut)
    args: Any = (None, cut, None, None, lambda part: part)
    stages: list[Any] = build_with_sublayers(build, copy.deepcopy(model), *args)
    return stages


@pytest.mark.parametrize("kind", ["llama3", "vit"])
def test_stages_compute_what_the_whole_model_does_to_the_last_bit(kind: str) -> None:
    model, inputs = model_of(kind)
    stages = stages_of(kind, model)
    hidden = inputs
    for stage in stages:
        hidden = stage(hidden)
    output = model(inputs)
    torch.testing.assert_close(hidden, output, rtol=0, atol=0)
    for each in (hidden, output):
        each.square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    found = [(name, p.grad) for stage in stages for name, p in stage.named_parameters()]
    assert sorted(name for name, _ in found) == sorted(expected)
    for name, gradient in found:
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=0, msg=name)


def squares(output: Tensor, labels: Tensor) -> Tensor:
    return output.square().sum()


@pytest.mark.parametrize("kind", ["llama3", "vit"])
def test_masks_of_halves_leave_gradients_of_the_whole_model(kind: str) -> None:
    """As under a plan, which freezes tensors of an attention and not those of its MLP."""
    model, two = model_of(kind)
    inputs, stages = torch.cat([two, two.roll(1, -1)]), stages_of(kind, model)
    random, names = np.random.default_rng(5), [list(dict(s.named_parameters())) for s in stages]
    masks = {
        stage: {m: random.random(len(own)) < 0.5 for m in range(N_MICROBATCHES)}
        for stage, own in enumerate(names)
    }
    with process_group():
        ran = Pipeline(stages, LOOPED, loss_fn=squares).run(masks, (inputs, inputs))
    exact: list[dict[str, Any]] = []
    for rows in inputs.chunk(N_MICROBATCHES):
        model.zero_grad()
        squares(model(rows), rows).backward()
        exact.append({name: p.grad for name, p in model.named_parameters()})
    order = [
        a.microbatch for a in ran.executed if a.stage == 0 and a.kind is ActionKind.FULL_BACKWARD
    ]
    assert sorted(order) == list(range(N_MICROBATCHES))
    for stage, (own, gradients) in enumerate(zip(names, ran.gradients, strict=True)):
        for i, (name, gradient) in enumerate(zip(own, gradients, strict=True)):
            live = [exact[m][name] for m in order if not masks[stage][m][i]]
            assert (gradient is None) == (not live), name
            if gradient is not None:
                torch.testing.assert_close(gradient, sum(live), rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("kind", ["llama3", "vit"])
def test_weights_of_halves_are_drawn(kind: str) -> None:
    for stage in stages_of(kind, model_of(kind)[0]):
        with torch.no_grad():
            for parameter in stage.parameters():
                parameter.fill_(torch.nan)
            stage.init_weights()
        # The tokens for class and place of a ViT are drawn with its embedding.
        assert all(p.isfinite().all() for p in stage.parameters())


@pytest.mark.parametrize("kind", ["llama3", "vit"])
def test_attention_and_mlp_are_the_whole_block(kind: str) -> None:
    for block in model_of(kind)[0].layers.values():
        both = sublayer_sizes(kind, block)
        assert sum(both) == sum(p.numel() for p in block.parameters())
        attention = ("attention", "layernorm_before")
        sizes = {n: p.numel() for n, p in block.named_parameters()}
        assert both[0] == sum(n for name, n in sizes.items() if name.startswith(attention))


def test_modules_of_a_cut_block() -> None:
    modules = modules_of_split(SPLIT, sublayers=True)
    assert modules == [
        ["tok_embeddings", "layers.0"],
        ["layers.1/attention"],
        ["layers.1/mlp"],
        ["layers.2", "layers.3/attention"],
        ["layers.3/mlp", "norm", "output"],
    ]
    assert count_sublayers(modules) == SPLIT
    assert count_layers(modules) == (1, 1, 0, 2, 0)  # where they begin
