"""The step at which a run's adapters are merged."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.torchtitan.helpers.job_configs import config
from torchtitan.freezing.elastic.adapters import AdaptersFirst
from torchtitan.settings import JobConfig


def test_all_weights_learn_after_as_many_steps_as_adapters_have_and_once(tmp_path: Path) -> None:
    def build(half: JobConfig, run: Any) -> Any:
        dims = SimpleNamespace(pp_enabled=False)
        return SimpleNamespace(config=half, stop=None, controller=None, parallel_dims=dims, step=0)

    job_config = config(lora__until=3, job__dump_folder=str(tmp_path))
    run = AdaptersFirst(build, lambda half: None, job_config)
    assert run.trainer.config.freezing.method == "lora"
    left = []
    for run.trainer.step in range(6):
        if (leave := run.next_trainer()) is not None:
            left.append((run.trainer.step, leave.config.freezing.method))
    assert left == [(3, "timelyfreeze")]
