"""Models of one's own, cut into stages: mixtures of experts, blocks used twice, and no chains."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from tests.timelyfreeze.helpers.cut_run import (
    N_STAGES,
    SHORT,
    VOCABULARY,
    checked,
    emulated,
    loss_of,
    make_tokens,
)
from tests.timelyfreeze.helpers.stages import N_MICROBATCHES
from timelyfreeze import TimelyFreeze, partition_model
from timelyfreeze.settings import freezing

pytestmark = pytest.mark.usefixtures("one_rank")


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Mixture(nn.Module):
    """A token takes one expert of a list; the last expert gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(16), nn.Linear(16, 3, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        x = self.norm(hidden)
        weights = self.gate(x).softmax(-1)
        found = torch.zeros_like(x)
        for e in range(3):
            rows = (weights.argmax(-1) == e).nonzero(as_tuple=True)
            if len(rows[0]):
                found = found.index_put(rows, self.experts[e](x[rows]) * weights[rows][:, e, None])
        return hidden + found


class Plain(nn.Module):
    """A model as one writes it; its head has the output in a tuple."""

    def __init__(self, blocks: nn.ModuleList | nn.ModuleDict) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers, self.head = blocks, nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> tuple[Tensor]:
        hidden = self.embedding(tokens)
        for block in (
            self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers
        ):
            hidden = block(hidden)
        return (self.head(hidden),)


class Wide(nn.Sequential):
    """A block with a sum at its end: under split backwards torch takes no view from a stage."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(16), nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 16))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + super().forward(hidden)


@pytest.mark.parametrize("rank", [0, 4])
def test_an_expert_without_tokens_has_no_gradient(rank: int) -> None:
    torch.manual_seed(0)
    model = Plain(nn.ModuleDict({str(n): Mixture() for n in range(N_STAGES)}))
    run = checked(model, "ZBVZeroBubble", make_tokens(), gradient_rank=rank)
    assert run.step(9)["layers.2.experts.3.up.weight"] is None


@pytest.mark.parametrize("rank", [0, 4])
def test_a_block_used_twice_comes_into_one_stage_or_is_refused(rank: int) -> None:
    blocks = [Wide() for _ in range(N_STAGES)]
    twice = Plain(nn.ModuleList(b for b in blocks for _ in range(2)))
    checked(twice, "1F1B", make_tokens(), gradient_rank=rank)
    apart = Plain(nn.ModuleList([*blocks, *blocks]))
    with pytest.raises(ValueError, match=r"'layers\.4\..*' is used in stages 0 and 2, each of "):
        partition_model(apart, N_STAGES, make_tokens()[0])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8])
def test_weights_of_less_than_16_bits_are_refused(dtype: torch.dtype) -> None:
    model = Plain(nn.ModuleList(Wide() for _ in range(N_STAGES)))
    layer = model.layers[1][1]
    layer.weight = nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False)
    stages = [PipelineStage(model, 0, 1, torch.device("cpu"))]
    schedule = torch_schedules.Schedule1F1B(stages[0], N_MICROBATCHES, loss_fn=loss_of)
    with pytest.raises(
        ValueError, match=rf"'layers\.1\.1\.weight' of stage 0 is stored as {dtype}"
    ):
        TimelyFreeze(schedule, **SHORT)


def test_a_large_head_takes_blocks_from_its_stage() -> None:
    model = Plain(nn.ModuleList(Wide() for _ in range(6)))
    model.head = nn.Linear(16, 3 * 256 * 16 // 16)
    tokens = make_tokens()[0]

    def blocks_of(n_stages: int, **arguments: Any) -> list[int]:
        stages = partition_model(model, n_stages, tokens, **arguments)
        return [sum(isinstance(b, nn.Sequential) for b in s.layers) for s in stages]

    assert blocks_of(3) == [3, 2, 1]
    assert blocks_of(3, by="parameters") == [2, 3, 1]
    assert blocks_of(6, by="parameters") == [1, 1, 1, 1, 1, 1]
    with pytest.raises(ValueError, match="6 layers are too few for 8 stages"):
        blocks_of(8)
    with pytest.raises(ValueError, match="by is 'memory'; it must be"):
        blocks_of(2, by="memory")


def test_a_model_that_is_no_chain_is_told() -> None:
    tokens = make_tokens()[0]

    class Mixed(Plain):
        def forward(self, tokens: Tensor) -> tuple[Tensor]:
            hidden = self.embedding(tokens)
            for block in self.layers:
                hidden = hidden + block(hidden)
            return (self.head(hidden),)

    class Short(Plain):
        def forward(self, tokens: Tensor) -> tuple[Tensor]:
            return (self.head(self.layers[0](self.embedding(tokens))),)

    blocks = nn.ModuleList(Wide() for _ in range(2))
    with pytest.raises(ValueError, match="Mixed changes hidden states between them"):
        partition_model(Mixed(blocks), 2, tokens)
    with pytest.raises(ValueError, match="Short runs 1 of 2"):
        partition_model(Short(blocks), 2, tokens)
    with pytest.raises(ValueError, match=r"Embedding has 0 lists of blocks \(\)"):
        partition_model(nn.Embedding(3, 3), 2, tokens)
    beside = Plain(blocks)
    beside.scale = nn.Parameter(torch.ones(16))
    with pytest.raises(ValueError, match="Plain has parameter 'scale' beside its blocks"):
        partition_model(beside, 2, tokens)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("names", [("embedding", "layers.0."), (".1.weight", ".3.bias")])
def test_what_requires_no_gradient_is_left_alone(
    names: tuple[str, ...], schedule: str, rank: int
) -> None:
    model = Plain(nn.ModuleList(Wide() for _ in range(N_STAGES)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in names))
    run = checked(model, schedule, make_tokens(), gradient_rank=rank)
    assert not all(p.requires_grad for _, p in run.parameters)


def test_wide_models_learn_in_subspaces_without_being_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ranks(**arguments: Any) -> tuple[int, ...]:
        model = Plain(nn.ModuleList(Wide() for _ in range(N_STAGES)))
        return emulated(
            model, "1F1B", make_tokens(), **arguments
        ).freezer._controller.subspaces.dimensions

    assert ranks(last_warmup_step=3) == (0,)
    monkeypatch.setattr(freezing, "WIDE", 16)
    assert ranks(last_warmup_step=3) == (16, 32, 64)
    assert ranks(last_warmup_step=3, gradient_rank=0) == (0,)
    assert ranks(method="fixed", policy={"layers": 2}) == (0,)
