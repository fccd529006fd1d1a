"""Broken bounds files, plans and schedules: refused by file, key and value, or right after all."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzz.mangling import DEEP, VALUES, fuzzed, mangled_bytes, mangled_json, message_of
from tests.timelyfreeze.helpers.pipelines import hand_order
from timelyfreeze.cli.main import main as program
from timelyfreeze.cli.plan import main
from timelyfreeze.files import MOST
from timelyfreeze.planning.plan import plan_from_json, plan_from_ratios, plan_to_json
from timelyfreeze.schedule.dag import build_dag
from timelyfreeze.schedule.order import ScheduleError, ScheduleOrder, order_from_csv, order_to_csv
from timelyfreeze.timing.bounds import bounds_from_json, uniform_bounds
from timelyfreeze.whatif.bounds_file import PipelineMetadata, bounds_file_text, read_bounds_file
from timelyfreeze.whatif.times import StageTimes

ORDER = hand_order("two_by_two")
DAG = build_dag(ORDER)
BOUNDS = uniform_bounds(DAG, forward_ms=1.0, backward_ms=(1.0, 2.0))
NOTES = PipelineMetadata(
    schedule="GPipe",
    ranks=2,
    processors=1.5,
    first_stage="per_tensor",
    skip_input_grads="off",
    layers=(4, 3),
    tokens_per_microbatch=2048,
    stages=(StageTimes(1.0, 2.0, 1.0, 0.5, 1.5, 0.5), StageTimes(2.0, 4.0, 2.0, 2.0, 2.0, 0.0)),
    layer=StageTimes(0.5, 1.0, 0.5, 0.5, 0.5, 0.0),
    fixed=StageTimes(0.1, -0.1, 0.0, 0.0, -0.1, 0.0),
)
BOUNDS_TEXT = bounds_file_text(DAG, BOUNDS, NOTES)
PLAN_TEXT = plan_to_json(plan_from_ratios(DAG, BOUNDS, np.zeros(len(DAG.actions))))
CSV = order_to_csv(ORDER)


@fuzzed(50)
@given(
    data=mangled_json(json.loads(BOUNDS_TEXT)).map(str.encode) | mangled_bytes(BOUNDS_TEXT.encode())
)
def test_a_broken_bounds_file_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bounds.json"
    path.write_bytes(data)

    def read() -> None:
        file = read_bounds_file(path)
        assert all(0.0 <= low <= high < math.inf for low, high in file.table.bounds.values())
        assert not any(times.errors() for times in file.stage_times())

    message = message_of(read)
    assert message is None or str(path) in message


@fuzzed(25)
@given(action=st.sampled_from(list(json.loads(BOUNDS_TEXT)["bounds"])), value=VALUES)
@example(action="1B0", value=1.1e15)
def test_a_time_that_is_none_is_named_by_its_key(
    tmp_path: Path, action: str, value: object
) -> None:
    data = json.loads(BOUNDS_TEXT)
    data["bounds"][action]["max_ms"] = value
    path = tmp_path / "bounds.json"
    path.write_text(json.dumps(data))
    is_time = type(value) in (int, float) and 0.0 <= value <= MOST  # type: ignore[operator]
    message = str(message_of(lambda: read_bounds_file(path)))
    # Half a character is refused before keys are looked at.
    is_half = "half a character" in message
    assert is_time or is_half or f"bounds.{action}.max_ms is " in message
    message = message_of(lambda: bounds_from_json(DAG, json.dumps(data)))
    assert is_time or action in str(message)


@fuzzed(40)
@given(text=mangled_json(json.loads(BOUNDS_TEXT)))
def test_broken_bounds_in_a_checkpoint_are_refused(text: str) -> None:
    message_of(lambda: bounds_from_json(DAG, text))


@fuzzed(40)
@given(
    text=mangled_json(json.loads(PLAN_TEXT))
    | mangled_bytes(PLAN_TEXT.encode()).map(lambda data: data.decode("utf-8", "replace"))
)
def test_what_is_no_plan_is_refused(text: str) -> None:
    def read() -> None:
        plan = plan_from_json(text)
        assert ((plan.ratios >= 0.0) & (plan.ratios <= 1.0)).all()
        assert (np.isfinite(plan.durations_ms) & (plan.durations_ms >= 0.0)).all()
        assert math.isfinite(plan.batch_ms)

    message_of(read)


@fuzzed(25)
@given(
    action=st.sampled_from(list(json.loads(PLAN_TEXT)["actions"])),
    key=st.sampled_from(["ratio", "duration_ms", "start_ms"]),
    value=VALUES,
)
def test_a_number_of_a_plan_that_is_none_is_named_by_its_key(
    action: str, key: str, value: object
) -> None:
    data = json.loads(PLAN_TEXT)
    data["actions"][action][key] = value
    most = 1.0 if key == "ratio" else MOST
    is_right = type(value) in (int, float) and 0.0 <= value <= most  # type: ignore[operator]
    message = message_of(lambda: plan_from_json(json.dumps(data)))
    assert (message is None) == is_right
    assert is_right or f"actions.{action}.{key} is " in str(message)


@fuzzed(50)
@given(
    text=mangled_bytes(CSV.encode()).map(lambda data: data.decode("utf-8", "replace"))
    | st.text(alphabet='0123456789FBIW,\n" \x00', max_size=60)
    | st.lists(
        st.lists(st.from_regex(r"[0-3][FBIW][0-3]", fullmatch=True), max_size=9), max_size=4
    ).map(lambda rows: "\n".join(",".join(row) for row in rows))
)
def test_a_broken_schedule_is_refused_before_it_is_run(text: str) -> None:
    message = message_of(lambda: _is_complete(order_from_csv(text)), refusals=(ScheduleError,))
    assert message is None or "the schedule's CSV file" in message


def _is_complete(order: ScheduleOrder) -> None:
    """Assert that each microbatch is run forward and backward once by each stage."""
    done = [str(action) for row in order.ranks for action in row]
    assert len(set(done)) == len(done)
    for stage in range(order.n_stages):
        for microbatch in range(order.n_microbatches):
            whole = f"{stage}B{microbatch}" in done
            assert f"{stage}F{microbatch}" in done
            assert whole != (f"{stage}W{microbatch}" in done and f"{stage}I{microbatch}" in done)


@pytest.mark.parametrize(
    "cells",
    ["0F0,0B0,999999999F0,999999999B0", "0F99999999999,0B99999999999", f"0F0,{'0' * 200_000}"],
    ids=["stage", "microbatch", "cell"],
)
def test_a_number_beyond_reason_takes_no_time(cells: str) -> None:
    assert message_of(lambda: order_from_csv(cells), refusals=(ScheduleError,))


def test_what_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bounds.json"
    path.write_text(DEEP)
    assert "nested too deeply" in str(message_of(lambda: read_bounds_file(path)))
    assert "nested too deeply" in str(message_of(lambda: bounds_from_json(DAG, DEEP)))
    assert "nested too deeply" in str(message_of(lambda: plan_from_json(DEEP)))


# -- the command line ------------------------------------------------------------------------------


def status_of(arguments: list[str]) -> object:
    try:
        return main(arguments)
    except SystemExit as error:  # argparse
        return error.code


OPTIONS = {
    "--schedules": ["GPipe", "1F1B", "2F2B", "", "ZBVZeroBubble"],
    "--r-max": ["0.5", "1", "-1", "nan", "inf", "x", ""],
    "--microbatches": ["2", "0", "-3", "1.5", "x", "999999999", "9" * 400],
    "--splits": ["default", "best", "4,3", "7", "0,7", "9,9", "-1,8", ",", "x"],
    "--ranks": ["2", "1", "0", "-1", "4", "x", "999999999", "9" * 400],
    "--layers": ["4,3", "3,4,5", "0,0", "-1,2", "x"],
    "--first-stage": ["per_tensor", "all_or_nothing", "x"],
    "--skip-input-grads": ["off", "use", "plan"],
    "--processors": ["1.5", "0", "-1", "nan", "inf", "x"],
    "--p2p-overhead-ms": ["0.5", "-1", "nan", "inf", "x", "1e308"],
    "--batches": ["2", "0", "-1", "x", "9" * 400],
    "--outside-ms": ["1", "-1", "nan", "inf", "x", "1e308"],
    "--time-limit-s": ["5", "0", "-1", "nan", "inf", "x"],
    "--json": ["/dev/full/x", "."],
    "--csv": ["no/such/folder/x.csv"],
    "--odd": ["1"],
}


@fuzzed(30)
@given(
    chosen=st.dictionaries(st.sampled_from(list(OPTIONS)), st.integers(0, 99), max_size=3),
    text=st.just(BOUNDS_TEXT) | mangled_json(json.loads(BOUNDS_TEXT)),
)
def test_the_plan_command_ends_with_a_table_or_with_what_is_wrong(
    tmp_path_factory: pytest.TempPathFactory,
    capfd: pytest.CaptureFixture[str],
    chosen: dict[str, int],
    text: str,
) -> None:
    path = tmp_path_factory.mktemp("plan", numbered=True) / "bounds.json"
    path.write_text(text)
    arguments = [str(path), "--schedules", "GPipe"]
    for option, n in chosen.items():
        arguments += [option, OPTIONS[option][n % len(OPTIONS[option])]]
    capfd.readouterr()
    status = status_of(arguments)
    printed = capfd.readouterr()
    assert status in (0, 2)
    if status == 2:
        assert "error: " in printed.err
    else:
        assert "planning for" in printed.out


@pytest.mark.parametrize(
    ("option", "value"),
    [
        (o, v)
        for o in ("--microbatches", "--ranks", "--batches")
        for v in ("999999999999", "9" * 400)
    ]
    + [("--p2p-overhead-ms", "1e308"), ("--outside-ms", "1e308")],
)
def test_a_pipeline_beyond_reason_takes_no_time(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    path = tmp_path / "bounds.json"
    path.write_text(BOUNDS_TEXT)
    assert status_of([str(path), "--schedules", "GPipe", option, value]) == 2
    assert option in capfd.readouterr().err


@fuzzed(20)
@given(
    words=st.lists(
        st.sampled_from(["", "x", "-1", "--output", "/dev/null", "\x00", "x" * 5000, "--odd", "."]),
        max_size=4,
    )
)
@pytest.mark.parametrize("command", ["draw", "plan"])
def test_words_at_random_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: str,
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    capfd.readouterr()
    try:
        status = program([command, *words])
    except SystemExit as error:  # argparse
        status = error.code
    assert status == 2 or (command == "draw" and set(words) & {".", ""})
    if status == 2:
        assert "error: " in capfd.readouterr().err
