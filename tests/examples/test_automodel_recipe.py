"""The recipe for NeMo AutoModel over a stand-in, which calls what it overrides in upstream's order.

``test_hosts.py`` has upstream itself, in an environment of its own.
"""

import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from tests.timelyfreeze.helpers.stages import (
    FULL,
    N_MICROBATCHES,
    make_batch,
    make_modules,
    process_group,
    sum_loss,
)

RECIPE = Path(__file__).parents[2] / "examples/automodel_recipe.py"
STEPS, SAVED = 14, 11
SHORT = {
    "last_warmup_step": 1, "last_monitor_step": 7, "last_ramp_step": 9, "discard_batches": 1,
    "min_gain": -1.0, "max_freeze_ratio": 0.5,
}  # fmt: skip


class Upstream:
    """What the recipe needs of upstream's; ``cfg`` has a folder, and the step to resume after."""

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        self.dist_env = SimpleNamespace(is_main=True)

    def setup(self) -> None:
        self.parts = make_modules()
        stages = [PipelineStage(part, i, len(self.parts), torch.device("cpu"))
                  for i, part in enumerate(self.parts)]  # fmt: skip
        schedule = FULL(stages, N_MICROBATCHES, loss_fn=sum_loss, scale_grads=False)
        self.pp = SimpleNamespace(info=SimpleNamespace(schedule=schedule))
        self.optimizer = [torch.optim.SGD(part.parameters(), lr=0.01) for part in self.parts]
        self.step_scheduler = SimpleNamespace(step=0)
        self.load_checkpoint(self.cfg.restore_from)

    def load_checkpoint(self, restore_from: int | None = None) -> None:
        if restore_from is None:
            return
        folder = self.cfg.folder / str(restore_from)
        for part, weights in zip(self.parts, torch.load(folder / "weights"), strict=True):
            part.load_state_dict(weights)
        state = self.freezer.state_dict()
        dcp.load(state, checkpoint_id=folder / "freezer")
        self.freezer.load_state_dict(state)
        self.step_scheduler.step = restore_from

    def save_checkpoint(self) -> None:
        assert self.freezer.use_distributed_checkpointing
        folder = self.cfg.folder / str(self.step_scheduler.step + 1)
        dcp.save(self.freezer.state_dict(), checkpoint_id=folder / "freezer")
        torch.save([part.state_dict() for part in self.parts], folder / "weights")

    def run_train_validation_loop(self) -> None:
        count = self.step_scheduler
        for step in range(count.step, STEPS):
            count.step = step
            batches = [make_batch(2 * step + n) for n in range(2)]
            assert self._run_train_optim_step(batches, 1.0) == "metrics"
            if step + 1 == SAVED:
                self.save_checkpoint()

    def _run_train_optim_step(self, batches: list[Any], max_grad_norm: float | None) -> str:
        for tokens, labels in batches:
            self.pp.info.schedule.step(tokens, target=labels)
        for optimizer in self.optimizer:
            optimizer.step()
            optimizer.zero_grad()
        return "metrics"


def weights_after(cfg: Any, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    arguments, recipe = ModuleType("arguments"), ModuleType("recipe")
    arguments.parse_args_and_load_config = lambda: cfg  # type: ignore[attr-defined]
    recipe.TrainFinetuneRecipeForNextTokenPrediction = Upstream  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nemo_automodel.components.config._arg_parser", arguments)
    monkeypatch.setitem(sys.modules, "nemo_automodel.recipes.llm.train_ft", recipe)
    ran = runpy.run_path(str(RECIPE), run_name="__main__")["recipe"]
    return [p.detach() for part in ran.parts for p in part.parameters()]


def test_a_resumed_run_learns_as_one_that_did_not_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    freezing = SimpleNamespace(to_dict=lambda: dict(SHORT))
    cfg = SimpleNamespace(folder=tmp_path, freezing=freezing, restore_from=None)
    with process_group():
        whole = weights_after(cfg, monkeypatch)
        cfg.restore_from = SAVED
        resumed = weights_after(cfg, monkeypatch)
    for ours, theirs in zip(whole, resumed, strict=True):
        assert torch.equal(ours, theirs)
    reports = capsys.readouterr().out.split("TimelyFreeze, ")[1:]
    assert [report.splitlines()[0] for report in reports] == [f"step {STEPS}, phase stable"] * 2
    planned = [[line for line in report.splitlines() if line.startswith("planned ratios")]
               for report in reports]  # fmt: skip
    assert planned[0] == planned[1] != []
