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
    words = JOB.command(Settings(Path("small.toml"), ("--a.b=c",), degree=2), Path("out"))
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
    words = JOB.command(Settings(Path("small.toml"), given, degree=2), Path("out"))
    assert [word for word in words if re.match("--parallelism.*degree", word)] == [given[0]]


@pytest.mark.parametrize(
    ("arguments", "emulates", "n_ranks"),
    [
        ((), True, 12),
        (("--emulation.no-enable", "--parallelism.pipeline-parallel-degree", "2"), False, 6),
        (("--emulation.no_enable", "--emulation.enable"), True, 12),
        (("--parallelism.tensor_parallel_degree=2",), True, 24),
    ],
)
def test_arguments_go_before_the_file(
    tmp_path: Path, arguments: tuple[str, ...], emulates: bool, n_ranks: int
) -> None:
    config = tmp_path / "small.toml"
    config.write_text(
        "[emulation]\nenable = true\n[parallelism]\npipeline_parallel_degree = 4\n"
        "data_parallel_replicate_degree = 3\ndata_parallel_shard_degree = -1\n"
    )
    settings = Settings(config, arguments)
    assert settings.emulates is emulates
    assert settings.n_ranks == n_ranks


@pytest.mark.parametrize("text", ["emulation = 3\n", "= no TOML"])
def test_a_file_that_is_wrong_is_left_to_those_who_check_it(tmp_path: Path, text: str) -> None:
    config = tmp_path / "small.toml"
    config.write_text(text)
    assert not Settings(config).emulates
    assert Settings(config).n_ranks == 1
