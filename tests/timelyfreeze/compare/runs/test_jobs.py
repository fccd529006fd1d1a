"""How a run is started."""

import re
import sys
from pathlib import Path

import pytest

from tests.timelyfreeze.compare.run_folders import keys_of
from timelyfreeze.compare.runs.asked import plan_jobs
from timelyfreeze.compare.runs.jobs import Settings

(JOB,) = plan_jobs(["apf"], ["GPipe"], [7], 2)


def test_the_command_of_a_run() -> None:
    words = JOB.command(Settings(Path("small.toml"), ("--a.b=c",)), Path("out"))
    assert words[:6] == [
        sys.executable, "-m", "timelyfreeze.cli.torchrun", "--nproc_per_node=2",
        "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0",
    ]  # fmt: skip
    assert words[6:10] == ["-m", "timelyfreeze.cli.worker", "--job.config_file", "small.toml"]
    assert words[-1] == "--a.b=c"
    assert keys_of(words[10:]) == {
        "job.dump_folder": "out",
        "freezing.method": "apf",
        "freezing.seed": "7",
        "debug.seed": "7",
        "data.seed": "7",
        "parallelism.pipeline_parallel_schedule": "GPipe",
        "parallelism.pipeline_parallel_degree": "2",
        "a.b": "c",
    }


@pytest.mark.parametrize(
    "given",
    [
        ("--parallelism.pipeline_parallel_degree=1",),
        ("--parallelism.pipeline-parallel-degree", "1"),
    ],
)
def test_a_degree_that_is_given_holds(given: tuple[str, ...]) -> None:
    words = JOB.command(Settings(Path("small.toml"), given), Path("out"))
    assert [word for word in words if re.match("--parallelism.*degree", word)] == [given[0]]
