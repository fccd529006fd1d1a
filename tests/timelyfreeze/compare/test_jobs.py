"""How a run is started."""

import re
import sys
from pathlib import Path

import pytest

from tests.timelyfreeze.compare.run_folders import keys_of
from timelyfreeze.compare.jobs import ROOT, Settings, environment, plan_jobs, train_command

(JOB,) = plan_jobs(["apf"], ["GPipe"], [7], 2)


def test_the_command_of_a_run() -> None:
    words = train_command(JOB, Settings(Path("small.toml"), ("--a.b=c",)), Path("out"))
    assert words[:6] == [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
        "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0",
    ]  # fmt: skip
    assert words[6:8] == ["-m", "torchtitan.freezing"]
    assert words[-1] == "--a.b=c"
    assert keys_of(words[8:]) == {
        "job.config_file": "small.toml",
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
    words = train_command(JOB, Settings(Path("small.toml"), given), Path("out"))
    assert [word for word in words if re.match("--parallelism.*degree", word)] == [given[0]]


def test_the_environment_follows_run_train() -> None:
    base = {"PATH": "/bin", "PYTHONPATH": "/mine", "CUDA_VISIBLE_DEVICES": "0,1"}
    gpus = environment(base, nproc=2, n_gpus=2, n_cores=8)
    assert gpus["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "OMP_NUM_THREADS" not in gpus
    assert gpus["PYTHONPATH"] == f"{ROOT}:/mine"
    assert gpus["PATH"] == "/bin"
    cpus = environment(base, nproc=3, n_gpus=2, n_cores=8)
    assert (cpus["CUDA_VISIBLE_DEVICES"], cpus["OMP_NUM_THREADS"]) == ("", "2")
    assert environment({}, nproc=4, n_gpus=0, n_cores=2)["OMP_NUM_THREADS"] == "1"
    own = environment({"OMP_NUM_THREADS": "5"}, nproc=4, n_gpus=0, n_cores=2)
    assert own["OMP_NUM_THREADS"] == "5"
    assert own["PYTHONPATH"] == str(ROOT)
