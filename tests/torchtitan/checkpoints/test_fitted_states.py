"""What a checkpoint lacks, because it was saved by other processes or never was."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torchtitan.components.checkpoint as titan_checkpoint
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config.job_config import Checkpoint

from tests.torchtitan.checkpoints.test_manager import State
from tests.torchtitan.upstream.test_fixes import fresh
from torchtitan.checkpoints.manager import CheckpointError, SafeCheckpointManager, fitted_states

pytestmark = pytest.mark.usefixtures("one_rank")


class Part(State):
    """Processes save parts of their own; whoever goes on wants all of them."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {f"part_{self.value}": self.value}

    def state_to_load(self, keys: Any) -> dict[str, Any]:
        return dict.fromkeys(keys, 0)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def manager(folder: Path, part: Part, *, upstream: bool = False) -> Any:
    """A manager of two layers and their optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizers = OptimizersContainer([model], torch.optim.AdamW, {"lr": 0.1, "foreach": True})
    of = fresh(titan_checkpoint).CheckpointManager if upstream else SafeCheckpointManager
    made = of(
        dataloader=State(0),
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=State(0),
        states={"train_state": State(0), "part": part},
        checkpoint_config=Checkpoint(enable=True, interval=1, keep_latest_k=0),
        sd_adapter=None,
        base_folder=str(folder),
    )
    made.model, made.optimizers = model, optimizers
    return made


def train(made: Any, steps: range, first: int) -> dict[str, torch.Tensor]:
    """Train, the first layer from step ``first`` on; return the weights."""
    for step in steps:
        made.optimizers.zero_grad()
        generator = torch.Generator().manual_seed(step)
        made.model(torch.randn(4, 3, generator=generator)).square().sum().backward()
        if step < first:
            for parameter in made.model[0].parameters():
                parameter.grad = None
        made.optimizers.step()
    return {name: tensor.clone() for name, tensor in made.model.state_dict().items()}


@pytest.mark.parametrize("upstream", [True, False])
def test_upstream_still_cannot_go_on_where_a_tensor_was_never_updated(
    upstream: bool, tmp_path: Path
) -> None:
    want = train(manager(tmp_path / "whole", Part(1)), range(8), first=6)
    made = manager(tmp_path, Part(1))
    train(made, range(4), first=6)
    made.save(4)
    again = manager(tmp_path, Part(1), upstream=upstream)
    if upstream:
        with pytest.raises(
            CheckpointException, match=r"Missing key .* optimizer\.state\.0\.weight"
        ):
            again.load()
        return
    assert again.load()
    state = again.optimizers.state_dict()
    assert state["state.0.weight.step"] == 0
    assert state["state.1.weight.step"] == 4
    got = train(again, range(4, 8), first=6)
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


def test_a_checkpoint_without_any_state_of_the_optimizer_is_refused(tmp_path: Path) -> None:
    made = manager(tmp_path, Part(1))
    made.states["optimizer"] = State(3)
    made.save(4)
    with pytest.raises(CheckpointError, match=r"step-4 cannot be loaded: Missing key .*optimizer"):
        manager(tmp_path, Part(1)).load()


def test_adapters_that_a_checkpoint_lacks_begin_anew() -> None:
    names = ["0.weight", "0.lora_A.default.weight", "0.lora_B.default.weight"]
    states = {name: torch.zeros(1) for name in names}
    assert fitted_states(states, names) == states
    assert list(fitted_states(states, names[:1])) == names[:1]
    assert list(fitted_states({"0.weight": states["0.weight"]}, [])) == names[:1]


def test_parts_of_other_processes_are_loaded(tmp_path: Path) -> None:
    manager(tmp_path, Part(7)).save(4)
    part = Part(2)
    assert manager(tmp_path, part).load()
    assert part.loaded == {"part_7": 7}
