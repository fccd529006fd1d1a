import doctest
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import timelyfreeze.planning.background
from tests.timelyfreeze.helpers.pipelines import random_bounds
from timelyfreeze.planning.background import (
    STOP_SIGNALS,
    AwaitedCall,
    BackgroundCall,
    BackgroundError,
)
from timelyfreeze.planning.lp import LpError, solve_freeze_ratios
from timelyfreeze.schedule.dag import build_dag
from timelyfreeze.schedule.order import one_f_one_b_order

FULL = Path("/dev/full")
pytestmark = pytest.mark.slow


def test_docstring_example() -> None:
    failed, attempted = doctest.testmod(timelyfreeze.planning.background)
    assert (failed, attempted > 0) == (0, True)


@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
def test_a_full_disk_under_the_answer_is_a_sentence() -> None:
    with FULL.open("wb") as answer:
        done = subprocess.run(
            [sys.executable, "-c", timelyfreeze.planning.background._START, str(os.getpid()), "0"],
            input=pickle.dumps((len, ("abc",), {})),
            stdout=answer,
            stderr=subprocess.PIPE,
        )
    assert done.stderr == b"the answer cannot be written: [Errno 28] No space left on device\n"


def test_the_plan_is_the_one_made_here() -> None:
    dag = build_dag(one_f_one_b_order(3, 6))
    bounds = random_bounds(dag, 0)
    here = solve_freeze_ratios(dag, bounds, max_freeze_ratio=0.6)
    with BackgroundCall(solve_freeze_ratios, dag, bounds, max_freeze_ratio=0.6) as call:
        there = call.result()
    assert there.ratios.tolist() == here.ratios.tolist()
    assert there.batch_ms == here.batch_ms


def test_goes_on_meanwhile() -> None:
    # Neither beginning nor giving up waits for the function: longer than a test may take.
    with BackgroundCall(time.sleep, 3600.0) as call:
        assert not call.done


def test_done_says_when_there_is_an_answer_also_one_larger_than_a_pipe() -> None:
    with BackgroundCall(bytes, 2_000_000) as call:
        while not call.done:
            time.sleep(0.01)
        assert call.result() == bytes(2_000_000)
        assert call.result() == bytes(2_000_000)


def test_an_error_arrives_as_it_was_raised() -> None:
    dag = build_dag(one_f_one_b_order(8, 16))
    bounds = random_bounds(dag, 0)
    with (
        BackgroundCall(
            solve_freeze_ratios, dag, bounds, max_freeze_ratio=0.5, time_limit_s=1e-9
        ) as call,
        pytest.raises(LpError, match="S=8 stages") as error,
    ):
        call.result()
    assert error.value.status == "Time limit reached"
    assert "solve_freeze_ratios" in error.value.__notes__[0]


class Unfit(Exception):
    """Needs two arguments, so that pickle cannot make it again."""

    def __init__(self, left: str, right: str) -> None:
        super().__init__(left + right)


def raise_unfit() -> None:
    raise Unfit("odd", "ity")


def test_an_error_that_does_not_pickle_arrives_as_another() -> None:
    with BackgroundCall(raise_unfit) as call, pytest.raises(RuntimeError, match="Unfit: oddity"):
        call.result()


def test_a_process_that_dies_is_an_error() -> None:
    with (
        BackgroundCall(os.abort) as call,
        pytest.raises(BackgroundError, match=rf"abort.*exit status {-signal.SIGABRT}"),
    ):
        call.result()


def test_what_the_function_prints_does_not_spoil_the_answer(capfd: pytest.CaptureFixture) -> None:
    with BackgroundCall(print, "hello") as call:
        assert call.result() is None
    assert capfd.readouterr() == ("", "hello\n")


def test_runs_at_low_priority_and_without_a_gpu() -> None:
    with BackgroundCall(os.nice, 0) as call:
        assert call.result() == 19
    with AwaitedCall(os.nice, 0) as call:  # beside other work that would take for ever
        assert call.result() == os.nice(0)
    with BackgroundCall(os.getenv, "CUDA_VISIBLE_DEVICES") as call:
        assert call.result() == ""


def test_finds_what_this_process_finds(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "only_here.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    assert str(tmp_path) in sys.path
    with BackgroundCall(only_here.double, 21) as call:
        assert call.result() == 42


def test_a_call_in_a_hurry_is_made_again_at_this_priority(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "starved.py").write_text(
        "import os, time\n"
        "def niceness():\n"
        "    if os.nice(0) == 19:\n"
        "        time.sleep(600.0)\n"
        "    return os.nice(0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import starved

    with BackgroundCall(starved.niceness) as call:
        assert not call.done
        call.hurry()
        assert call.result(300.0) == os.nice(0)


def test_an_answer_that_does_not_come_is_not_waited_for() -> None:
    with (
        BackgroundCall(time.sleep, 600.0) as call,
        pytest.raises(BackgroundError, match=r"called time\.sleep gave no answer within 0\.2 s"),
    ):
        call.result(timeout_s=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_to_stop_takes_no_answer_away(number: signal.Signals) -> None:
    with BackgroundCall(time.sleep, 0.3) as call:
        ((process, _),) = call._tries
        os.kill(process.pid, number)
        assert call.result() is None
    assert number not in signal.pthread_sigmask(signal.SIG_BLOCK, []), "this process hears it"


def test_it_ends_with_a_caller_that_is_killed() -> None:
    code = (
        "import os, signal, time; from timelyfreeze.planning.background import BackgroundCall; "
        "call = BackgroundCall(time.sleep, 600.0); print(call._tries[0][0].pid, flush=True); "
        "time.sleep(1.5); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL
    pid, deadline = int(killed.stdout), time.monotonic() + 20.0
    while _is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_alive(pid)


def _is_alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
