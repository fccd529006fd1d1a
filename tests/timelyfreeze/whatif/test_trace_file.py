"""Traces of PyTorch's profiler: times worked out by hand, and each broken trace's reason."""

import gzip
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests.timelyfreeze.whatif.traces_by_hand import (
    MAIN,
    Event,
    bare,
    event,
    kernel,
    launch,
    note,
    write,
)
from timelyfreeze.schedule import Action
from timelyfreeze.whatif import trace_file
from timelyfreeze.whatif.bounds_file import BoundsFile
from timelyfreeze.whatif.trace_file import is_trace, read_trace_files


def times(file: BoundsFile) -> dict[str, tuple[float, float]]:
    return {str(a): (round(low, 9), round(high, 9)) for a, (low, high) in file.table.bounds.items()}


def row(file: BoundsFile, rank: int) -> str:
    assert file.order is not None
    return " ".join(map(str, file.order.ranks[rank]))


# One stage, two batches of two microbatches: forwards compute for 4, 2, 5 and 3 ms, backwards for
# 6, 10, 7 and 9 ms. Each waits for its message first.
COMPUTED = [("F0", 4, 6), ("F1", 2, 10), ("F0", 5, 7), ("F1", 3, 9)]


def on_a_cpu() -> list[Event]:
    events, now = [], 5e12
    for begin in (0, 2):
        for kind, place in (("F", 1), ("B", 2)):
            for microbatch in (0, 1):
                took = 1e3 * COMPUTED[begin + microbatch][place]
                wait = 700.0 * (1 + microbatch)
                events.append(note(f"0{kind}{microbatch}", now, wait + took + 30.0))
                # Half of the time in an operation and in one within it, then another one.
                events.append(event("aten::mm", now + wait + took / 2, took / 2))
                events.append(event("aten::linear", now + wait, took / 4))
                events.append(event("aten::t", now + wait + 1, 2.0))
                # A loader works on, meanwhile.
                events.append(event("aten::stack", now, wait + took, tid=MAIN + 1))
                now += wait + took + 500.0
    return events


def test_medians_are_of_what_was_computed_and_waits_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.json", on_a_cpu())
    file = read_trace_files([path], 0.25)
    # Medians of 2, 3, 4, 5 and of 6, 7, 9, 10; the first stage's backward can be left out whole.
    assert times(file) == {
        "0F0": (3.5, 3.5), "0F1": (3.5, 3.5), "0B0": (0.0, 8.0), "0B1": (0.0, 8.0),
    }  # fmt: skip
    assert row(file, 0) == "0F0 0F1 0B0 0B1"
    assert (file.n_stages, file.n_microbatches, file.n_ranks) == (1, 2, 1)
    # From the end of the first wait: 4 + 2 + 6 + 10, waits of 1.4, 0.7 and 1.4, three gaps of 0.5;
    # then 5 + 3 + 7 + 9 with the same.
    assert "a batch takes 28.0 ms, the median of 2" in file.notes[0]
    assert "25% are taken for gradients of weights" in file.notes[1]


def on_a_gpu() -> list[Event]:
    """A stage behind another: kernels run later than they are launched, backwards' elsewhere."""
    return [
        note("0F0", 100.0, 50.0), launch(1, 110.0), launch(2, 120.0),
        kernel(1, 1000.0, 400.0), kernel(2, 1500.0, 600.0),  # 1.1 ms
        note("0F0", 101.0, 1.0, "gpu_user_annotation"),
        note("0SEND_F0", 151.0, 5.0), launch(3, 152.0), kernel(3, 2100.0, 9000.0, "ncclSendRecv"),
        note("0B0", 200.0, 100.0),
        # Launched by autograd's thread; torch's own annotation of the GPU holds the first alone.
        launch(4, 210.0, MAIN + 1), kernel(4, 12000.0, 100.0), launch(5, 290.0, MAIN + 1),
        kernel(5, 14000.0, 500.0), note("0B0", 12000.0, 100.0, "gpu_user_annotation"),
        # Of a prefetch in another stream, launched in it and run before it.
        launch(6, 205.0), kernel(6, 3000.0, 50.0, "ncclDevKernel_AllGather"),
        launch(7, 310.0), kernel(7, 15000.0, 99.0), kernel(8, 200.0, 99.0),
        event("aten::mm", 110.0, 5.0),
    ]  # fmt: skip


def test_on_a_gpu_an_action_is_its_kernels_wherever_they_were_launched(tmp_path: Path) -> None:
    second = [
        {**e, "name": e["name"].replace(":0", ":1")} for e in on_a_gpu() if "SEND" not in e["name"]
    ]
    paths = [write(tmp_path / "b.json", second), write(tmp_path / "a.json", on_a_gpu())]
    file = read_trace_files(paths)
    assert times(file) == {
        "0F0": (1.1, 1.1), "0B0": (0.0, 2.5), "1F0": (1.1, 1.1), "1B0": (1.5, 2.5),
    }  # fmt: skip
    assert file.path == tmp_path / "a.json and 1 more"


def test_split_backwards_are_measured(tmp_path: Path) -> None:
    rows = ["0F0 0F1 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 0I1 0W1", "1F0 2F0 2I0 2W0 1F1 2F1 2I1 1I0 "
            "1W0 2W1 1I1 1W1"]  # fmt: skip
    took = {f"{s}{k}": n + s for s in range(4) for k, n in zip("FIW", (1.0, 2.0, 3.0), strict=True)}
    paths = bare(tmp_path, rows, took | {"0I": 0.0})
    file = read_trace_files(paths[::-1])
    found = times(file)
    assert found["2I1"] == (4.0, 4.0)
    assert found["3W0"] == (0.0, 6.0)
    assert found["0I0"] == (0.0, 0.0)
    assert [row(file, 0), row(file, 1)] == rows
    assert len(file.notes) == 1  # nothing had to be taken for granted


def test_a_gzipped_trace_and_one_in_torchs_form_are_told_from_a_bounds_file(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.json", on_a_cpu())
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    assert times(read_trace_files([packed])) == times(read_trace_files([path]))
    assert is_trace(path)
    assert is_trace(packed)
    bounds = Path(__file__).parents[3] / "profiles/tiny_8m_1F1B/bounds.json"
    assert not is_trace(bounds)


ONE = [note("0F0", 0.0, 10.0), note("0B0", 20.0, 10.0)]
WRONG: dict[str, tuple[list[Any], str]] = {
    "no_annotation": ([event("Forward 0", 0.0, 5.0, "user_annotation")],
                      r"no action is annotated; .*ScheduleInterleaved1F1B\(\[stage\], \.\.\.\)"),
    "two_threads": ([ONE[0], {**ONE[1], "tid": 9}], "overlap or are of several threads"),
    "overlap": ([ONE[0], {**ONE[1], "ts": 9.0}], "overlap or are of several threads"),
    "at_once": ([ONE[0], {**ONE[0], "name": "PP:0B0"}], "overlap or are of several threads"),
    "part_of_a_batch": ([*ONE, note("0F0", 40.0, 5.0)], "3 annotated actions, 2 different ones"),
    "validation": ([note("0F0", -0.0, 0.1), *[{**e, "ts": e["ts"] + 1} for e in ONE]],
                   "record whole steps of training alone, without validation"),
    "cpu_alone": ([*ONE, event("nccl:recv 0<-1", 3.0, 1.0, "user_annotation")],
                  "record it with ProfilerActivity.CPU and ProfilerActivity.CUDA"),
    "no_launches": ([*ONE, kernel(1, 2.0, 1.0)], "lacks kernels or their launches"),
    "gpu_annotations": ([*ONE, note("0F0", 2.0, 1.0, "gpu_user_annotation")], "lacks kernels"),
    "nothing_within": ([*ONE, event("aten::mm", 15.0, 1.0)], "no operation ran within PP:0F0"),
    "no_backward": ([ONE[0]], "action 0I0 is missing; each stage runs every microbatch"),
    "huge_microbatch": ([note("0F999999999", 0.0, 1.0)], "action 0F0 is missing"),
    "longer_number": ([note("0F9999999999", 0.0, 1.0)], "is not an action"),
    "no_time": ([{**ONE[0], "ts": None}], "ts of 'PP:0F0' is None; it must be 0 or more"),
    "text": ([{**ONE[0], "ts": "0"}], "ts of 'PP:0F0' is '0'; it must"),
    "backwards": ([{**ONE[0], "dur": -1.0}], "must be 0 or more"),
    "infinite": ([{**ONE[0], "dur": float("inf")}], "must be 0 or more"),
    "nan": ([{**ONE[0], "ts": float("nan")}], "must be 0 or more"),
    "no_correlation": ([*ONE, {**kernel(1, 0.0, 1.0), "args": 5}], "args.correlation of 'gemm'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_trace_that_cannot_be_used_says_why(tmp_path: Path, name: str) -> None:
    events, said = WRONG[name]
    path = write(tmp_path / "odd.json", events)
    with pytest.raises(ValueError, match=said) as error:
        read_trace_files([path])
    assert "odd.json" in str(error.value)


def test_other_events_are_passed_over(tmp_path: Path) -> None:
    odd: list[Any] = [
        5, [1], {"ph": "M", "name": "process_name"}, {"ph": "i", "name": "PP:0F0", "ts": "now"}, {},
        {"ph": "X", "name": 5}, event("PP:0UNSHARD", 1.0, 1.0, "user_annotation"),
        event("PP:(0F1;0B0)OVERLAP_F_B", 50.0, 1.0, "user_annotation"),
        event("cudaDeviceSynchronize", 1.0, 2.0, "cuda_runtime"),
    ]  # fmt: skip
    path = write(tmp_path / "trace.json", [*odd, *ONE, *odd])
    assert times(read_trace_files([path])) == {"0F0": (0.01, 0.01), "0B0": (0.0, 0.01)}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a", "a"], r"action 0F0 was already run by rank 0.*have: a.json stages \[0\], a.json"),
        (["b"], "no rank runs stage 0, yet stage 1 exists"),
        (["a"], "stage 0 sends its output on, and no stage 1 exists"),
        (["a", "c"], "stage 1 sends its output on, and no stage 2 exists"),
    ],
)
def test_the_traces_are_of_all_ranks_of_one_pipeline(
    tmp_path: Path, names: list[str], said: str
) -> None:
    behind = [{**e, "name": e["name"].replace("0", "1", 1)} for e in ONE]
    send = [note("0SEND_F0", 12.0, 1.0)]
    files = {"a": [*ONE, *send], "b": behind, "c": [*behind, note("1SEND_F0", 12.0, 1.0)]}
    paths = [write(tmp_path / f"{name}.json", files[name]) for name in names]
    with pytest.raises(ValueError, match=said) as error:
        read_trace_files(paths)
    assert "plan takes a trace of each rank of one pipeline" in str(error.value)
    whole = [write(tmp_path / f"{name}.json", files[name]) for name in "ba"]
    assert Action.parse("1B0") in read_trace_files(whole).table.bounds


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"traceEvents": [{"ph": "X", "na', "is not JSON, or was cut off: Unterminated string"),
        (b'{"traceEvents": [' + b'{"a":' * 100_000, "it is nested too deeply"),
        (b"\x1f\x8bno gzip", "it cannot be read: "),
        (gzip.compress(b'{"traceEvents": [1, 2, 3]}', mtime=0)[:-9], "it cannot be read: "),
        (
            gzip.compress(b" " * 5_000_000, mtime=0),
            "unpacked it has over 4 MiB; record fewer steps",
        ),
    ],
)
def test_a_broken_file_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bytes, said: str
) -> None:
    monkeypatch.setattr(trace_file, "_MOST_BYTES", 2**22)
    path = tmp_path / "broken.json"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"broken\.json") as error:
        read_trace_files([path])
    assert said in str(error.value)


def test_what_is_not_there_is_no_trace(tmp_path: Path) -> None:
    assert not is_trace(tmp_path / "none.json")
    assert not is_trace(tmp_path)
    with pytest.raises(ValueError, match=r"none\.json: it cannot be read: .*No such file"):
        read_trace_files([tmp_path / "none.json"])


def test_events_that_do_not_count_take_no_memory(tmp_path: Path) -> None:
    """A trace as a list of Python's objects takes ten times as much as its text."""
    odd = [event("aten::mm", 100.0, 1.0, "other", args={"External id": n}) for n in range(30_000)]
    path = write(tmp_path / "trace.json", [*ONE, *odd])
    tracemalloc.start()
    read_trace_files([path])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * path.stat().st_size
