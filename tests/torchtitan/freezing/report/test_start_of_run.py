"""What is known of a run before its first step."""

from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan.freezing.config.job_config import JobConfig
from torchtitan.freezing.report import times
from torchtitan.freezing.report.times import summary_at_start


def dims(pp: int, world_size: int = 4) -> Any:
    return SimpleNamespace(pp_enabled=pp > 1, world_size=world_size, non_data_parallel_size=pp)


def job_config() -> JobConfig:
    config = JobConfig()
    config.job.config_file = "train_configs/tiny_8m.toml"
    config.model.flavor = "8M"
    config.training.dataset = "alpaca"
    config.training.dataset_path = "./rows"
    config.training.steps = 120
    config.parallelism.pipeline_parallel_schedule = "GPipe"
    config.freezing.method = "timelyfreeze"
    config.debug.seed = 3
    config.data.seed = 5
    return config


def test_what_a_pipeline_run_knows_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "usable_cores", lambda: 1.5)
    start = summary_at_start(job_config(), dims(2), "Abacus 3000", "cpu")
    assert (start.method, start.schedule, start.model) == ("timelyfreeze", "GPipe", "llama3 8M")
    assert (start.seed, start.data_seed, start.steps) == (3, 5, 120)
    assert (start.n_devices, start.ranks_per_replica) == (4, 2)
    assert start.device == "Abacus 3000, 1.5 cores"
    assert start.dataset == "alpaca: ./rows"
    several = job_config()
    several.data.paths = ["a.jsonl", "owner/b"]
    assert summary_at_start(several, dims(2), "", "cpu").dataset == "alpaca: a.jsonl, owner/b"
    assert start.config_file == "train_configs/tiny_8m.toml"
    assert start.torch_version == torch.__version__
    assert start.steps_done == 0
    assert datetime.fromisoformat(start.started_at).tzinfo is not None


def test_what_does_not_apply_is_none() -> None:
    config = job_config()
    config.data.shuffle = False
    config.debug.seed = None
    start = summary_at_start(config, dims(1), "NVIDIA H100", "cuda")
    assert start.schedule is start.seed is start.data_seed is None
    assert start.device == "NVIDIA H100", "cores are a matter of the CPU"
    config.data.shuffle = True
    config.training.dataset, config.training.dataset_path = "c4_test", None
    start = summary_at_start(config, dims(1), "NVIDIA H100", "cuda")
    assert (start.dataset, start.data_seed) == ("c4_test", None)


def test_a_schedule_of_ones_own_goes_by_its_file() -> None:
    config = job_config()
    config.parallelism.pipeline_parallel_schedule_csv = "my/eager.csv"
    assert summary_at_start(config, dims(2), "x", "cuda").schedule == "eager.csv"
