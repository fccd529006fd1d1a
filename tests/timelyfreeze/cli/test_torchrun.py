"""What is left of torchrun's stack trace: none for an error of the user's, all of it else."""

import subprocess
import sys
from pathlib import Path

import pytest

from timelyfreeze.cli import torchrun

ROOT = Path(__file__).resolve().parents[3]


def fails_with(monkeypatch: pytest.MonkeyPatch, *exit_codes: int) -> None:
    """Let torchrun's processes end with these codes, one second after the other."""
    errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    failures = {}
    for rank, code in enumerate(exit_codes):
        failures[rank] = errors.ProcessFailure(rank, 100 + rank, code, "<N/A>")
        failures[rank].timestamp = rank

    def run() -> None:
        raise errors.ChildFailedError("worker", failures)

    monkeypatch.setattr("torch.distributed.run.main", run)


def test_an_error_of_the_user_keeps_its_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    # The others are ended by torchrun.
    fails_with(monkeypatch, 2, -15)
    with pytest.raises(SystemExit) as end:
        torchrun.main()
    assert end.value.code == 2


@pytest.mark.parametrize("exit_codes", [(1,), (-9, 2)])
def test_any_other_failure_is_torchruns_own(
    monkeypatch: pytest.MonkeyPatch, exit_codes: tuple[int, ...]
) -> None:
    fails_with(monkeypatch, *exit_codes)
    with pytest.raises(Exception, match="worker FAILED"):
        torchrun.main()


@pytest.mark.multiprocess
def test_an_error_of_the_configuration_is_told_without_a_stack_trace(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "timelyfreeze", "train", "train_configs/tiny_8m.toml", "--nproc=1",
        "--freezing.max_freeze_ratio=1.5", f"--job.dump_folder={tmp_path}",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert done.stdout.startswith("error: The configuration has ")
    assert "freezing.max_freeze_ratio is 1.5" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())
