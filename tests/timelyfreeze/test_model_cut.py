"""Models of transformers, cut into stages and frozen, against the same model in one piece."""

from __future__ import annotations

import copy
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.timelyfreeze.helpers.cut_run import (
    N_STAGES,
    SCHEDULES,
    VOCABULARY,
    checked,
    emulated,
    exact_gradients,
    make_tokens,
)
from tests.timelyfreeze.helpers.stages import N_MICROBATCHES
from timelyfreeze import partition_model
from timelyfreeze.control.dimensions import _learned
from timelyfreeze.runtime import FreezingStage

pytestmark = pytest.mark.usefixtures("one_rank")

transformers = pytest.importorskip("transformers", reason="the models are those of transformers")

PAGE = Path(__file__).parents[2] / "docs" / "library.md"
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": N_STAGES, "num_attention_heads": 4, "max_position_embeddings": 32,
}  # fmt: skip
PICTURES = {
    **{key: value for key, value in SIZES.items() if key != "vocab_size"},
    "image_size": 16, "patch_size": 4, "num_labels": 5,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
GPT2 = {"n_embd": 32, "n_layer": N_STAGES, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 32}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 4, "num_heads": 4, "vocab_size": 64}
# By the names of classes in transformers, without their ends: the end, and the configuration.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("ForCausalLM", GROUPED),
    "Qwen3": ("ForCausalLM", {**HEADS, "tie_word_embeddings": True}),
    "Gemma3": ("ForCausalLM", {**HEADS, **WINDOWS}),
    "Phi": ("ForCausalLM", GROUPED),
    "Olmo2": ("ForCausalLM", {**GROUPED, "eos_token_id": 1}),
    "Mistral": ("ForCausalLM", {**GROUPED, "sliding_window": 4}),
    "GPTNeoX": ("ForCausalLM", SIZES),
    "Bert": ("ForMaskedLM", SIZES),
    "ViT": ("ForImageClassification", PICTURES),
    "GPT2": ("LMHeadModel", {**GPT2, "bos_token_id": 0, "eos_token_id": 0}),
    "Qwen3Moe": ("ForCausalLM", {**HEADS, **EXPERTS}),
    "Mixtral": ("ForCausalLM", {**GROUPED, "num_local_experts": 4}),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "T5": ("ForConditionalGeneration", T5, r"2 lists of blocks \(encoder.block, decoder.block\)"),
    "Albert": ("ForMaskedLM", SIZES, "layer_groups are no chain: .* does not run each once"),
}


def make_model(family: str) -> Any:
    """A model without dropout, the same each time."""
    ending, settings, *_ = {**FAMILIES, **REFUSED}[family]
    kind = "Gemma3Text" if family == "Gemma3" else family
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings)
    return getattr(transformers, f"{family}{ending}")(config).eval()


def make_batch(family: str) -> tuple[Tensor, Tensor]:
    if family == "ViT":
        random, n = torch.Generator().manual_seed(1), 2 * N_MICROBATCHES
        pictures = torch.rand((n, 3, 16, 16), generator=random)
        return pictures, torch.randint(5, (n,), generator=random)
    return make_tokens()


def untied(model: nn.Module) -> nn.Module:
    """A copy of the model whose head has weights of its own, as in the last stage."""
    model = copy.deepcopy(model)
    embeddings = {p for part in model.modules() if isinstance(part, nn.Embedding)
                  for p in part.parameters()}  # fmt: skip
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer.weight in embeddings:
            layer.weight = nn.Parameter(layer.weight.detach().clone())
    return model


@cache
def exact_of_family(family: str) -> list[dict[str, Tensor]]:
    return exact_gradients(untied(make_model(family)), make_batch(family))


def cases() -> list[Any]:
    """Every family with every schedule, with subspaces and without; a third runs always."""
    found = []
    for i, family in enumerate(FAMILIES):
        for j, schedule in enumerate(SCHEDULES):
            for rank in (0, 4):
                is_short = (i + j + rank) % 3 == 0
                marks = [pytest.mark.slow] if is_short else [pytest.mark.long]
                found.append(pytest.param(family, schedule, rank, marks=marks))
    return found


@pytest.mark.parametrize(("family", "schedule", "rank"), cases())
def test_gradients_are_those_of_one_process_at_the_masks(
    family: str, schedule: str, rank: int
) -> None:
    run = emulated(make_model(family), schedule, make_batch(family), gradient_rank=rank)
    run.check(exact_of_family(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_compute_what_the_model_does_with_its_weights(family: str) -> None:
    model, (x, _) = make_model(family), make_batch(family)
    for by, n_stages in (("time", 3), ("parameters", 1)):
        hidden, names = x, []
        for stage in partition_model(model, n_stages, x[:1], by=by):
            hidden = stage(hidden)
            names += [name for name, _ in stage.named_parameters()]
        torch.testing.assert_close(hidden, model(x)[0], rtol=1e-5, atol=1e-6)
        wanted = (untied(model) if n_stages > 1 else model).named_parameters()
        assert sorted(names) == sorted(name for name, _ in wanted)


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_are_no_chain_are_refused(family: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[family][2]):
        partition_model(make_model(family), 2, make_batch(family)[0][:1])


def test_what_an_encoder_puts_out_is_no_hidden_state() -> None:
    model, (tokens, _) = make_model("T5"), make_batch("T5")
    with pytest.raises(ValueError, match="hands them something learned besides hidden states"):
        partition_model(model, 2, tokens, blocks="decoder.block", decoder_input_ids=tokens)


def test_arguments_of_the_model_reach_every_stage() -> None:
    model, (tokens, _) = make_model("Llama"), make_batch("Llama")
    mask = torch.ones_like(tokens)
    mask[:, -3:] = 0
    hidden = tokens
    for stage in partition_model(model, 3, tokens[:1], attention_mask=mask[:1]):
        hidden = stage(hidden, attention_mask=mask)
    torch.testing.assert_close(hidden, model(tokens, attention_mask=mask)[0])
    assert not torch.allclose(hidden, model(tokens)[0])


def test_the_page_has_the_families_and_where_subspaces_work() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    told = {name: cells for names, *cells in rows for name in names.split(", ")}
    for family in FAMILIES:
        stages = [FreezingStage(make_model(family), 0, 1, torch.device("cpu"))]
        (learned,) = map(_learned, stages)
        ranks = "16, 32, 64" if learned.of_layers >= 0.5 * learned.of_all else "0"
        assert told[family] == ["equal", ranks], family
    for family in REFUSED:
        assert told[family][0] == "refused"


def test_adapters_of_peft_are_frozen_alone() -> None:
    peft = pytest.importorskip("peft", reason="adapters are those of peft")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(make_model("Llama"), settings).eval()
    run = checked(model, "ZBVZeroBubble", make_tokens())
    learned = {name for name, p in run.parameters if p.requires_grad}
    assert learned == {name for name, _ in run.parameters if "lora_" in name}


def test_blocks_of_transformers_are_compared_with_a_reference() -> None:
    policy = {
        "check_interval": 1, "window": 2, "stale": 1, "bootstrap_change": 10.0, "tolerance": 10.0,
        "reference": "inline",
    }  # fmt: skip
    model, batch = make_model("Llama"), make_batch("Llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = emulated(model, "1F1B", batch, method="egeria", policy=policy, optimizer=optimizer)
    frozen = []
    for t in range(1, 10):
        frozen.append({name for name, gradient in run.step(t).items() if gradient is None})
        optimizer.step()
    assert "model.layers.0.mlp.up_proj.weight" in frozen[-1]
    assert "lm_head.weight" not in frozen[-1]
