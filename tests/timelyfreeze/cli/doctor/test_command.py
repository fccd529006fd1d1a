"""``timelyfreeze doctor``: exit status, what it looks at, and ranks that it starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from timelyfreeze.cli.doctor import command
from timelyfreeze.cli.doctor.host import Finding


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "NGPU", "TORCHRUN_ARGS", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def test_a_host_on_which_nothing_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "host_findings", lambda n, output: [Finding("cores", f"{n}")])
    monkeypatch.setenv("NGPU", "3")
    assert command.main([]) == 0
    said = capsys.readouterr().out
    assert said.startswith("ok     cores  3\n")
    assert said.endswith("\n\nNothing is wrong\n")


def test_an_output_folder_that_cannot_be_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "x.toml").write_text('[job]\ndump_folder = "file/run"\n')
    assert command.main(["x.toml"]) == 1
    said = capsys.readouterr().out
    assert "wrong  job.dump_folder" in said
    assert "1 wrong" in said


def test_a_model_that_is_not_there_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "host_findings", lambda n, output: [])
    (tmp_path / "here").mkdir()
    for name, status in (("./none", 1), ("here", 0), ("owner/model", 0)):
        (tmp_path / "x.toml").write_text(f'[model]\nhf_assets_path = "{name}"\n')
        assert command.main(["x.toml"]) == status
    assert "wrong  model.hf_assets_path  './none' is no folder here\n" in capsys.readouterr().out


def test_arguments_that_are_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in (
        "job = [",
        "a = " + "[" * 9999,
        "job = 3",
        "[job]\ndump_folder = 3",
        '[job]\ndump_folder = "~nouser/x"',
    ):
        (tmp_path / "x.toml").write_text(text)
        assert command.main(["x.toml"]) == 2
        told = "error: x.toml is no TOML that has a text as job.dump_folder: "
        assert told in capsys.readouterr().err
    with pytest.raises(SystemExit) as error:
        command.main(["--nproc", "0"])
    assert error.value.code == 2


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_ranks_meet_and_tell_of_links() -> None:
    root = Path(__file__).resolve().parents[4]
    done = subprocess.run(
        [sys.executable, "-m", "timelyfreeze", "doctor", "--nproc", "2"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(root)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok     ranks       2 met: 2 on " in done.stdout
    assert "ok     neighbours  1 pairs; the slowest, ranks 0 and 1: " in done.stdout
    assert done.stdout.endswith("\nNothing is wrong\n")
