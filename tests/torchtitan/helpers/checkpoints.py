"""Checkpoints of a small model, saved by torch itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.models.llama3 import Transformer
from torchtitan.models.llama3.model.args import TransformerModelArgs

from tests.timelyfreeze.helpers.ranks import Ranks
from tests.torchtitan.helpers.job_configs import config
from timelyfreeze.schedule.order import one_f_one_b_order
from timelyfreeze.settings import arguments_named
from torchtitan.freezing.checks import checkpoints
from torchtitan.freezing.checks.checkpoints import checkpoint_errors
from torchtitan.settings import toml_key

# A pipeline of two ranks and four microbatches, two processes for each.
ORDER = one_f_one_b_order(2, 4)


def model_of(n_layers: int = 2, dim: int = 16) -> TransformerModelArgs:
    return TransformerModelArgs(dim=dim, n_layers=n_layers, n_heads=2, vocab_size=64)


@pytest.fixture(autouse=True, name="_small_model")
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flavors are of two layers, but for one of three and a wide one."""
    flavors = {"deep": model_of(n_layers=3), "wide": model_of(dim=32)}

    def known(job_config: Any) -> TransformerModelArgs:
        return flavors.get(job_config.model.flavor, model_of())

    monkeypatch.setattr(checkpoints, "known_args", known)


def weights() -> dict[str, Any]:
    return {name: torch.zeros_like(w) for name, w in Transformer(model_of()).state_dict().items()}


def save(place: Path, step: int, **states: Any) -> Path:
    """A checkpoint by torch itself, with all that a run goes on from."""
    trained = {"train_state": {"step": step}, "optimizer": {"state.x": torch.ones(500)}}
    dcp.save({**weights(), **trained, **states}, checkpoint_id=place, no_dist=True)
    return place


def write(folder: Path, last_step: int = 5, **data: Any) -> Path:
    """A checkpoint of step 6, by torch itself."""
    ranks = Ranks(ORDER, n_replicas=2)
    ranks.run(1, last_step)
    place = folder / "outputs" / "checkpoint" / "step-6"
    return save(place, 6, freezing=ranks.saved(), dataloader={"world_size": 2, **data})


def saved_config(**changes: Any) -> Any:
    values = {
        "checkpoint__enable": True,
        "parallelism__pipeline_parallel_degree": 2,
        "parallelism__data_parallel_shard_degree": 4,
        "training__local_batch_size": 4,
        "training__dataset": "alpaca",
        **changes,
    }
    return config(**values)


def found(folder: Path, **changes: Any) -> list[str]:
    changes["job__dump_folder"] = str(folder / "outputs")
    with arguments_named(toml_key):
        return list(checkpoint_errors(saved_config(**changes)))
