"""How a run is started: the command, its environment, and what is refused before."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from timelyfreeze.cli import train
from timelyfreeze.cli.doctor import command as doctor
from timelyfreeze.cli.train import count_gpus, run_environment
from timelyfreeze.files import shown


class Started(Exception):
    """Torchrun would run now."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What would be started, from a folder with a TOML file and on a host without GPUs."""
    seen: dict[str, Any] = {}

    def execve(path: str, command: list[str], environment: dict[str, str]) -> None:
        seen.update(path=path, command=command, environment=environment)
        raise Started

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr("timelyfreeze.cli.train.count_gpus", lambda base: 0)
    monkeypatch.delenv("NGPU", raising=False)
    monkeypatch.delenv("TORCHRUN_ARGS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.toml").write_text("")
    return seen


def test_torchrun_takes_the_place_of_the_command(started: dict[str, Any]) -> None:
    with pytest.raises(Started):
        train.main(["x.toml", "--nproc", "2", "--training.steps=3", "--quiet"])
    assert started["path"] == sys.executable
    assert started["command"] == [
        sys.executable, "-m", "timelyfreeze.cli.torchrun", "--nproc_per_node=2",
        "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "-m", "timelyfreeze.cli.worker",
        "--job.config_file", "x.toml", "--training.steps=3", "--quiet",
    ]  # fmt: skip
    assert started["environment"]["CUDA_VISIBLE_DEVICES"] == ""


def test_torchrun_waits_for_steps_that_take_longer_than_its_own_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = pytest.importorskip("torch.distributed.launcher.api")
    for name, value in run_environment({}, 1, n_gpus=0).items():
        monkeypatch.setenv(name, value)
    assert api.LaunchConfig(1, 1, 1).shutdown_timeout == 600


@pytest.mark.parametrize("words", [["--trainign"], ["--nporc", "2"], ["y.toml"]])
def test_misspelled_options_are_told_before_anything_starts(
    started: dict[str, Any], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        train.main(["x.toml", *words])
    assert end.value.code == 2
    assert f"unrecognized arguments: {' '.join(words)}" in capsys.readouterr().err
    assert not started


def test_several_hosts_and_processes_come_from_variables_too(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NGPU", "3")
    monkeypatch.setenv("TORCHRUN_ARGS", "--nnodes=2 --node_rank=1")
    with pytest.raises(Started):
        train.main(["x.toml"])
    assert started["command"][3:6] == ["--nproc_per_node=3", "--nnodes=2", "--node_rank=1"]


def test_an_open_quotation_is_told(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, variable in ((["--torchrun", "'"], ""), ([], "'")):
        monkeypatch.setenv("TORCHRUN_ARGS", variable)
        for command in (train.main, doctor.main):
            with pytest.raises(SystemExit) as end:
                command(["x.toml", *arguments])
            assert end.value.code == 2
            assert 'argument --torchrun: "\'" is given: No closing' in capsys.readouterr().err


def status(arguments: list[str]) -> int | str | None:
    with pytest.raises(SystemExit) as end:
        train.main(arguments)
    return end.value.code


@pytest.mark.parametrize("n", ["0", "-1", "x", "1.5", "nan", "9" * 30, " "])
def test_a_number_of_processes_that_is_none_is_told(
    started: dict[str, Any],
    n: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, variable in (([f"--nproc={n}"], "1"), ([], n)):
        monkeypatch.setenv("NGPU", variable)
        assert status(["x.toml", *words]) == 2
        said = capsys.readouterr().err
        assert f"argument --nproc: {shown(n)} is given; it must be a whole number, 1 or" in said
        assert "[--nproc NGPU]" in said
    assert not started


@pytest.mark.parametrize("path", ["no.toml", ".", ""])
def test_a_configuration_that_is_no_file_is_told(
    started: dict[str, Any], path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status([path]) == 2
    assert f"argument CONFIG: {path!r} is given; it must be a file" in capsys.readouterr().err


def test_too_few_gpus_are_told(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("timelyfreeze.cli.train.count_gpus", lambda base: 2)
    with pytest.raises(Started):
        train.main(["x.toml", "--nproc=4"])
    assert "Using the CPU: 4 processes were asked for and 2 GPUs are visible" in (
        capsys.readouterr().out
    )


def test_processes_divide_the_cores_among_themselves_where_gpus_are_too_few() -> None:
    base = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0,1"}
    own = run_environment(base, 2, n_gpus=2, n_cores=8)
    assert own["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "OMP_NUM_THREADS" not in own
    assert own["PATH"] == "/bin"
    shared = run_environment(base, 4, n_gpus=2, n_cores=10)
    assert (shared["CUDA_VISIBLE_DEVICES"], shared["OMP_NUM_THREADS"]) == ("", "2")
    assert run_environment(base, 4, n_gpus=0, n_cores=2)["OMP_NUM_THREADS"] == "1"


def test_threads_that_wait_do_not_keep_a_core_from_those_they_wait_for() -> None:
    """Two threads beside other work took 24 s a step with OpenMP's own count, and 8 with this."""
    assert run_environment({}, 1, n_gpus=0, n_cores=2)["GOMP_SPINCOUNT"] == "10000"


def test_what_the_user_has_set_stays() -> None:
    base = {"OMP_NUM_THREADS": "3", "TOKENIZERS_PARALLELISM": "true"}
    variables = run_environment(base, 2, n_gpus=0, n_cores=8)
    assert {key: variables[key] for key in base} == base
    assert variables["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize("said", ["nothing", "exit 9", "exit 0"])
def test_torch_is_asked_where_the_drivers_tool_is_missing_or_fails(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers often have the driver without its tool; their runs went to the CPU in silence."""
    if said != "nothing":
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\necho 'GPU 0: H200 (UUID: x)'\n{said}\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert count_gpus({}) == (1 if said == "exit 0" else 3)


@pytest.mark.parametrize(("visible", "n"), [("0,1,2", 3), ("", 0), ("GPU-x", 1), (" ", 0)])
def test_gpus_are_those_that_are_visible(visible: str, n: int) -> None:
    assert count_gpus({"CUDA_VISIBLE_DEVICES": visible}) == n
