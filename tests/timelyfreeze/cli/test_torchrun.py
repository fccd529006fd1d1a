"""What is left of torchrun's stack trace: none where a line tells what is wrong, all of it else."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from timelyfreeze.cli import torchrun
from timelyfreeze.cli.torchrun import NEXT, PRESENT, Restart, present_restart

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
    monkeypatch.setattr(sys, "argv", ["torchrun", "worker.py"])


@pytest.mark.parametrize(
    ("options", "waits"),
    [
        (["--nnodes=2", "--node_rank=1", "--master_addr=a", "--master_port=7"],
         "Node 1 of 2 waits for the others at a:7, 900 s at most"),
        (["--nnodes=2", "--node-rank=1", "--master-addr=a", "--rdzv_conf=timeout=60"],
         "Node 1 of 2 waits for the others at a:29500, 60 s at most"),
        (["--nnodes=1:4", "--rdzv_backend=c10d", "--rdzv_endpoint=a:8"],
         "This node of 1:4 waits for the others at a:8"),
        (["--nnodes=1", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"], None),
    ],
)  # fmt: skip
def test_nodes_that_do_not_meet_are_told_in_a_line(
    options: list[str], waits: str | None, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def run() -> None:
        raise torch.distributed.DistStoreError("Timed out. 1/2 clients joined.\nframe #0")

    monkeypatch.setattr("torch.distributed.run.main", run)
    monkeypatch.setattr(sys, "argv", ["torchrun", *options, "worker.py", "--key=1"])
    if waits is None:
        with pytest.raises(torch.distributed.DistStoreError):
            torchrun.main()
        assert not capsys.readouterr().out, "one node waits for nobody"
        return
    with pytest.raises(SystemExit) as end:
        torchrun.main()
    assert end.value.code == 1
    said = capsys.readouterr()
    assert said.out == f"{waits}\n"
    node, place = waits.split(" waits for the others at ")
    assert said.err.startswith(
        f"error: {node} did not meet the others, or lost them, at {place}: Timed out. 1/2 clients "
        "joined.; start all nodes"
    )


def test_an_error_of_the_user_keeps_its_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    # The others are ended by torchrun.
    fails_with(monkeypatch, 2, -15)
    with pytest.raises(SystemExit) as end:
        torchrun.main()
    assert end.value.code == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_stop_is_told_in_a_line_with_the_status_of_shells(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api = pytest.importorskip("torch.distributed.elastic.multiprocessing.api")

    def run() -> None:
        api._terminate_process_handler(number, None)

    monkeypatch.setattr("torch.distributed.run.main", run)
    monkeypatch.setattr(sys, "argv", ["torchrun", "worker.py"])
    with pytest.raises(SystemExit) as end:
        torchrun.main()
    assert end.value.code == 128 + number
    assert capsys.readouterr().err == f"Stopped by {number.name}\n"


@pytest.mark.usefixtures("heeded")
def test_what_nohup_ignores_torchrun_is_not_to_heed(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun sets its handlers where it starts processes, by this variable."""
    name = "TORCHELASTIC_SIGNALS_TO_HANDLE"
    monkeypatch.delenv(name, raising=False)
    seen = []
    monkeypatch.setattr("torch.distributed.run.main", lambda: seen.append(os.environ[name]))
    monkeypatch.setattr(sys, "argv", ["torchrun", "worker.py"])
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        torchrun.main()
    finally:
        signal.signal(signal.SIGHUP, former)
        monkeypatch.delenv(name)
    torchrun.main()
    assert seen == ["SIGTERM,SIGINT,SIGQUIT", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"]


@pytest.mark.parametrize("code", [2, 1])
def test_torchrun_says_nothing_of_an_error_that_was_told(
    code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards the words of torch's line: its first argument is the exit status."""
    api = pytest.importorskip("torch.distributed.elastic.multiprocessing.api")
    fails_with(monkeypatch, 2)
    with pytest.raises(SystemExit):
        torchrun.main()
    monkeypatch.setattr(api.logger, "propagate", True)
    context = api.SubprocessContext.__new__(api.SubprocessContext)
    context._running_local_ranks, context.entrypoint = {0}, "python"
    failure = api.ProcessFailure(0, 7, code, "<N/A>")
    context._failures = {0: failure}
    context.stdouts = context.stderrs = {}
    monkeypatch.setattr(context, "_capture_process_failures", lambda done: None)
    monkeypatch.setattr(context, "close", lambda: None)
    context._poll()
    assert (f"failed (exitcode: {code})" in caplog.text) == (code != 2)


@pytest.mark.parametrize("exit_codes", [(1,), (-9, 2)])
def test_any_other_failure_is_torchruns_own(
    monkeypatch: pytest.MonkeyPatch, exit_codes: tuple[int, ...]
) -> None:
    fails_with(monkeypatch, *exit_codes)
    with pytest.raises(Exception, match="worker FAILED"):
        torchrun.main()


@pytest.mark.parametrize("n_nodes", [1, 2])
def test_a_run_goes_on_with_as_many_processes_as_it_says(
    n_nodes: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part with four says that two will do, and that with two that it needs three again."""
    parts = [Restart([8, 2], [2, 3, 3, 2], 4, 12.5), Restart([4, 4, 2], [2, 3, 3, 2], 2, 25.0)]
    seen = []

    def run() -> None:
        seen.append((sys.argv, present_restart()))
        if NEXT in os.environ and len(seen) <= len(parts):
            parts[len(seen) - 1].leave()

    monkeypatch.setattr("torch.distributed.run.main", run)
    for name in (NEXT, PRESENT):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    words = ["torchrun", f"--nnodes={n_nodes}", "--nproc_per_node=4", "-m", "worker", "--key=4"]
    monkeypatch.setattr(sys, "argv", words)
    torchrun.main()
    if n_nodes > 1:
        assert seen == [(words, None)], "nobody starts processes on another node"
        return
    begin, finish = words[:2], words[3:]
    assert seen == [
        (words, None),
        ([*begin, "--nproc_per_node=2", *finish], parts[0]),
        ([*begin, "--nproc_per_node=3", *finish], parts[1]),
    ]
    assert not Path(os.environ[NEXT]).parent.exists(), "nothing is left"


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("--freezing.max_freeze_ratio=1.5", "freezing.max_freeze_ratio is 1.5"),
        ("--model.flavor=no", "model.flavor is 'no'"),  # which takes the model, so a rank tells
    ],
)
def test_an_error_of_the_configuration_is_told_without_a_stack_trace(
    word: str, told: str, tmp_path: Path
) -> None:
    command = [
        sys.executable, "-m", "timelyfreeze", "train", "train_configs/tiny_8m.toml", "--nproc=1",
        "--emulation.enable", word, f"--job.dump_folder={tmp_path}",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert done.stdout.startswith("error: The configuration has ")
    assert told in done.stdout
    assert done.stderr == ""
    assert not list(tmp_path.iterdir())
