"""Models of transformers, cut into stages and frozen, against the same model in one piece."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from tests.timelyfreeze.helpers.stages import N_MICROBATCHES, process_group
from timelyfreeze import TimelyFreeze
from timelyfreeze.control import merge_ranks
from timelyfreeze.model_cut import partition_model
from timelyfreeze.runtime import FreezingStage, named_order, run_in_order, stages_of

transformers = pytest.importorskip("transformers", reason="the models are those of transformers")

N_STAGES, VOCABULARY = 4, 64
SHORT = {
    "last_warmup_step": 2, "last_monitor_step": 8, "last_ramp_step": 9, "discard_batches": 1,
    "min_gain": -1.0, "max_freeze_ratio": 0.6, "skip_input_grads": "off",
}  # fmt: skip
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": N_STAGES, "num_attention_heads": 4, "max_position_embeddings": 32,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT2 = {"n_embd": 32, "n_layer": N_STAGES, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 32}
# By the first part of names in transformers: the end of the class's name, and its configuration.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("ForCausalLM", GROUPED),
    "Qwen3": ("ForCausalLM", {**HEADS, "tie_word_embeddings": True}),
    "Gemma3": ("ForCausalLM", {**HEADS, "sliding_window": 4,
                               "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "Phi": ("ForCausalLM", GROUPED),
    "Olmo2": ("ForCausalLM", {**GROUPED, "eos_token_id": 1}),
    "Mistral": ("ForCausalLM", {**GROUPED, "sliding_window": 4}),
    "GPT2": ("LMHeadModel", {**GPT2, "bos_token_id": 0, "eos_token_id": 0}),
    "GPTNeoX": ("ForCausalLM", SIZES),
    "Qwen3Moe": ("ForCausalLM", {**HEADS, **EXPERTS, "num_experts": 4}),
    "Mixtral": ("ForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "Bert": ("ForMaskedLM", SIZES),
    "ViT": ("ForImageClassification", {**{k: v for k, v in SIZES.items() if k != "vocab_size"},
                                       "image_size": 16, "patch_size": 4, "num_labels": 5}),
}  # fmt: skip
SCHEDULES = {"1F1B": 4, "Interleaved1F1B": 2, "ZBVZeroBubble": 2}  # with their numbers of ranks


@pytest.fixture(autouse=True)
def _one_process() -> Iterator[None]:
    with process_group():
        yield


def make_model(family: str) -> Any:
    ending, settings = FAMILIES[family]
    name = "Gemma3Text" if family == "Gemma3" else family
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    return getattr(transformers, f"{family}{ending}")(config).eval()  # without dropout


def make_batch(family: str) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    n = 2 * N_MICROBATCHES
    if family == "ViT":
        pictures = torch.rand((n, 3, 16, 16), generator=random)
        return pictures, torch.randint(5, (n,), generator=random)
    tokens = torch.randint(VOCABULARY, (n, 8), generator=random)
    return tokens, tokens


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")


def untied(model: nn.Module) -> nn.Module:
    """The model with weights of its own for each use, as stages have them."""
    model = copy.deepcopy(model)
    seen: set[int] = set()
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            if id(p) in seen and isinstance(module, nn.Linear) and name == "weight":
                setattr(module, name, nn.Parameter(p.detach().clone()))
            seen.add(id(p))
    return model


@cache
def exact(family: str) -> list[dict[str, Tensor]]:
    """Gradients of the model in one piece, for each microbatch, by name."""
    model = untied(make_model(family))
    found = []
    for x, y in zip(*(t.chunk(N_MICROBATCHES) for t in make_batch(family)), strict=True):
        model.zero_grad()
        loss_of(model(x)[0], y).backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    return found


class Run:
    """A few steps of a cut model under a schedule, at a learning rate of 0."""

    def __init__(self, family: str, name: str, **settings: Any) -> None:
        n_ranks = SCHEDULES[name]
        self.family, self.batch = family, make_batch(family)
        self.modules = partition_model(make_model(family), N_STAGES, self.batch[0][:1])
        stages = [
            PipelineStage(module, s, N_STAGES, torch.device("cpu"))
            for s, module in enumerate(self.modules)
        ]
        self.schedule = torch_schedules.ScheduleLoopedBFS(
            stages, N_MICROBATCHES, loss_fn=loss_of, scale_grads=False
        )
        order = named_order(name, n_ranks, N_MICROBATCHES, stages_per_rank=N_STAGES // n_ranks)
        run_in_order(self.schedule, merge_ranks(order))
        self.freezer = TimelyFreeze(self.schedule, **{**SHORT, **settings})
        self.stages: list[FreezingStage] = stages_of(self.schedule)
        self.masks: dict[int, Any] = {}
        for stage in self.stages:
            stage.freeze = self._noting(stage)

    def _noting(self, stage: FreezingStage) -> Callable[..., None]:
        def freeze(masks: Any, **kwargs: Any) -> None:
            self.masks[stage.stage_index] = {m: mask.copy() for m, mask in masks.items()}
            FreezingStage.freeze(stage, masks, **kwargs)

        return freeze

    def step(self, t: int) -> dict[str, Tensor | None]:
        """One step; return its gradients by name."""
        self.masks.clear()
        self.subspaces = {}
        for stage in self.stages:
            low = stage.low_rank
            for group in low.groups if low else ():
                self.subspaces.update(
                    {
                        n: (
                            low.bases[group.name].to(group.weights[0].dtype, copy=True),
                            group.of_inputs,
                        )
                        for n in group.names
                    }
                )
        with self.freezer.step(t):
            self.schedule.step(self.batch[0], target=self.batch[1], losses=[])
        named = [pair for module in self.modules for pair in module.named_parameters()]
        gradients = {name: p.grad for name, p in named}
        assert len(gradients) == len(named)
        for _, p in named:
            p.grad = None
        return gradients

    def expected(self) -> dict[str, Tensor | None]:
        """What the masks of the last step leave of the gradients of the model in one piece."""
        whole = exact(self.family)
        sums: dict[str, Tensor | None] = {}
        for stage in self.stages:
            for i, name in enumerate(stage.parameter_names):
                total = None
                for m in range(N_MICROBATCHES):
                    part = whole[m].get(name)
                    mask = self.masks.get(stage.stage_index, {}).get(m)
                    if mask is not None and mask[i] and part is not None:
                        if name not in self.subspaces:
                            continue
                        q, of_inputs = self.subspaces[name]
                        part = part @ q @ q.t() if of_inputs else q @ (q.t() @ part)
                    if part is not None:
                        total = part if total is None else total + part
                sums[name] = total
        return sums


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_one_process_at_the_masks(
    family: str, schedule: str, rank: int
) -> None:
    run = Run(family, schedule, gradient_rank=rank)
    n_frozen = 0
    for t in range(1, 12):
        found, wanted = run.step(t), run.expected()
        assert found.keys() == wanted.keys()
        for name, gradient in found.items():
            want = wanted[name]
            assert (gradient is None) == (want is None), (t, name)
            if want is not None:
                torch.testing.assert_close(
                    gradient, want, rtol=1e-5, atol=1e-6, msg=lambda m: f"{name}, step {t}: {m}"
                )
        n_frozen += sum(int(m.sum()) for of in run.masks.values() for m in of.values())
    assert n_frozen
    assert run.freezer.plan is not None
    run.freezer.close()
