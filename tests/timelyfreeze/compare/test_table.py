"""Tables of hand-written runs, worked out by hand, as they are in tests/assets/golden."""

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.timelyfreeze.compare.run_folders import WHAT, write_record, write_run, write_scores
from tests.timelyfreeze.compare.tables import csv_rows, rendered, table, told
from tests.tools.golden import assert_golden, assert_only
from timelyfreeze.compare.groups import compare
from timelyfreeze.compare.metrics import COLUMN_OF, Criteria
from timelyfreeze.compare.runs.run import find_runs, read_run
from timelyfreeze.records.scores import BENCHMARKS
from timelyfreeze.records.summary import RunSummary
from timelyfreeze.records.tables import MOVES, STEPS, Move, StepRow

FILE = "comparisons.txt"
Spec = tuple[str, dict[str, Any]]


def run(method: str, **what: Any) -> Spec:
    """A run: ``speed`` is its tokens/s, ``accuracy`` and ``n_questions`` are those of scores."""
    return method, what


def killed(method: str, exit_status: int | None = 1, **what: Any) -> Spec:
    """The record of a run that left nothing else, or that ended after ``steps_done``."""
    return method, {"exit_status": exit_status, **what}


def write(folder: Path, specs: list[Spec]) -> None:
    for i, (method, given) in enumerate(specs):
        place, what = folder / f"{i}", dict(given)
        scores = {key: what.pop(key) for key in ("accuracy", "n_questions") if key in what}
        if "speed" in what:
            what["tokens_per_second"] = what.pop("speed")
        if "exit_status" in what:
            write_record(place, what.pop("exit_status"), method=method, seed=what["seed"])
            if "steps_done" not in what:
                continue
        write_run(place / "tb" / "x", method, **what)
        if scores:
            write_scores(place / "tb" / "x", **scores)


def work(**training: int) -> dict[str, Any]:
    return {"training": {"seq_len": 64, "steps": 60, **training}, "optimizer": {"lr": 0.1}}


def capped(cap: float, seed: int, threshold: float) -> dict[str, Any]:
    freezing = {"max_freeze_ratio": cap, "seed": seed, "apf": {"threshold": threshold}}
    return {"training": {"local_batch_size": 8}, "freezing": freezing}


PLANNED = {"batch_ms_predicted": 200.0, "average_freeze_ratio": 0.58749, "seconds": 1234.56,
           "score_ms_per_step": 0.25}  # fmt: skip
IMAGES = {"unit": "images", "model": "vit tiny"}
VIRTUAL = {"emulated_ranks": 4, "n_devices": 1, "speed": 10.0}
GPU = {"device": "some GPU"}
LOSSES = [(10, 4.0), (20, 3.0), (30, 2.0)]  # running means 3.5 and 2.5: to be reached is 2.5
SCENARIOS: dict[str, list[Spec]] = {
    # +30, +32 and +25; the ratio of the mean speeds would be +30.
    "gains are paired by seed": [
        run(method, seed=seed, speed=speed)
        for seed, none, frozen in ((42, 400.0, 520.0), (22, 500.0, 660.0), (11, 200.0, 250.0))
        for method, speed in (("none", none), ("timelyfreeze", frozen))
    ],
    "prediction and measurement": [
        run("timelyfreeze", **PLANNED, batch_ms=210.0, train_loss=2.5, validation_loss=2.25,
            peak_memory_gib=1.5, score_memory_mib=12.0),
        run("timelyfreeze", **PLANNED, batch_ms=190.0, train_loss=3.5, validation_loss=None,
            peak_memory_gib=2.5, score_memory_mib=None, seed=22, failure="the solver gave up"),
    ],
    "pictures": [run("none", **IMAGES, speed=7.0, seed=seed, validation_top1=share)
                 for seed, share in ((1, 0.5), (2, 0.625))],
    "pictures and texts": [run("none", **IMAGES, speed=7.0), run("none", speed=250.0)],
    "time saved": [run("none", seconds=40.0), run("apf", seconds=30.0), run("lisa", seconds=50.0)],
    "time to the loss of the running mean": [
        run("none", losses=LOSSES),
        # Means 2.75, 2.25 and 4.0: one low loss at 16 s is not enough, and once is enough.
        run("apf", losses=[(8, 4.0), (16, 1.5), (24, 3.0), (32, 5.0)]),
        run("fixed", losses=[(7, 2.0), (14, 3.0)]),  # equal is reached
        run("linear", losses=[(9, 4.0), (99, 2.0), (199, 3.5)]),
        run("lisa", losses=[(9, 0.1)]),
    ],
    "seeds that never get there are counted": [
        run(method, seed=seed, losses=[(5, loss), (6, loss)])
        for seed, ours in ((1, 2.0), (2, 9.0)) for method, loss in (("none", 3.0), ("apf", ours))
    ],
    "a baseline that diverged sets no target": [
        run("none", losses=[(1, 2.0), (2, math.nan)]), run("apf", losses=[(1, 2.0), (2, 2.0)])
    ],
    "failed and unfinished runs count for nothing": [
        run("none", speed=100.0), killed("apf", 0, seed=1, speed=120.0, steps_done=60),
        killed("apf", seed=2), killed("apf", -9, seed=3, speed=999.0, steps_done=59),
        run("apf", speed=999.0, seed=4, steps_done=0), killed("fixed", None, seed=5),
        killed("fixed", seed=6),
    ],
    # One whose place is not known, or where no run has ended, counts in the row of none.
    "a run that did not end counts in the row of its own place": [
        run("apf"), run("apf", **GPU), run("apf", **GPU, seed=2, steps_done=3),
        killed("apf", seed=3), run("apf", device="another GPU", seed=4, steps_done=3),
    ],
    "accuracies": [
        run(method, seed=seed, accuracy=accuracy)
        for seed, none, frozen in ((42, 0.5, 0.53), (22, 0.4, 0.38))
        for method, accuracy in (("none", none), ("apf", frozen))
    ],
    "time to the accuracy is the whole time of a run that has it": [
        *(run(method, seed=seed, seconds=seconds, accuracy=accuracy)
          for seed, of in ((1, ((100.0, 0.5), (80.0, 0.5), (60.0, 0.49))),
                           (2, ((200.0, 0.4), (120.0, 0.41), (100.0, 0.5))))
          for method, (seconds, accuracy) in zip(("none", "apf", "fixed"), of, strict=True)),
        run("linear", seed=1, seconds=50.0, accuracy=0.9, n_questions=20),
        run("lisa", seed=1, seconds=50.0),
    ],
    "a gain needs the same schedule": [
        run("none", schedule="GPipe", speed=400.0),
        run("apf", schedule="1F1B", speed=500.0, losses=[(1, 1)] * 3),
    ],
    "a seed without none is left out of the gain": [
        run("none", speed=400.0), run("apf", speed=500.0), run("apf", seed=22, speed=700.0)
    ],
    # Of seed 22 there is no none run at all, of seed 42 none on that device.
    "other devices are neither averaged nor compared": [
        run("none", speed=100.0), run("apf", speed=120.0), run("apf", seed=22, speed=130.0),
        run("apf", speed=9000.0, **GPU),
    ],
    # Options of another method, and seeds, set no runs apart.
    "other settings are neither averaged nor taken for repeats": [
        run("none", speed=100.0, settings=capped(0.1, 42, 9)),
        *(run("timelyfreeze", seed=seed, speed=speed, settings=capped(cap, seed, speed))
          for cap, seed, speed in ((0.5, 42, 120.0), (0.8, 42, 130.0), (0.8, 22, 150.0))),
    ],
    "a gain needs as much work in a step": [
        run("none", speed=100.0, settings=work()), run("apf", speed=120.0, settings=work(steps=90)),
        run("fixed", speed=900.0, settings=work(seq_len=32)),
    ],
    "emulated pipelines are as fast as their virtual clock says": [
        run("none", speed=100.0), run("none", **VIRTUAL, virtual_tokens_per_second=200.0),
        run("apf", **VIRTUAL, virtual_tokens_per_second=300.0),
    ],
    "smaller differences are compared": [
        run("none", speed=100.0, config_file="x/small.toml"),
        run("apf", speed=120.0, config_file="y/small.toml"),
        run("fixed", speed=110.0, config_file="x/large.toml", torch_version="2.12.0", steps=30,
            steps_done=30),
    ],
    # 14:30 in the baselines' zone.
    "of several baselines the nearest in time counts": [
        *(run("none", speed=speed, started_at=f"2026-11-21T{hour}:00:00+00:00")
          for hour, speed in (("08", 100.0), ("13", 200.0), ("20", 400.0))),
        run("apf", speed=300.0, started_at="2026-11-21T23:30:00+09:00"),
    ],
    "a run whose none failed has no gain": [
        run("none", speed=100.0, steps_done=10), run("apf", speed=120.0)
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_table_reads_as_it_should(tmp_path: Path, name: str) -> None:
    write(tmp_path, SCENARIOS[name])
    assert_golden(FILE, name, told(tmp_path))


def test_the_loss_of_a_reference(tmp_path: Path) -> None:
    reference = write_run(tmp_path / "there", "none", **GPU, losses=LOSSES)
    here = [
        run("apf", losses=[(5, 3.0), (10, 2.5), (15, 2.4)]),
        run("fixed", losses=[(5, 3.0), (10, 2.5)]),
        run("lisa", losses=[(5, 1.0), (10, 1.0)], model="llama3 1B"),
    ]
    write(tmp_path / "here", here)
    text = told(tmp_path / "here", reference=reference)
    assert_golden(FILE, "a reference", text.replace(str(reference), "REFERENCE"))


def test_every_table_that_is_expected_is_made() -> None:
    assert_only(FILE, {*SCENARIOS, "a reference"})


def test_gains_ratios_and_accuracies_by_their_formulas(tmp_path: Path) -> None:
    write(tmp_path, SCENARIOS["gains are paired by seed"])
    gains = [float(row["gain_percent"]) for row in csv_rows(tmp_path)[3:]]
    assert sorted(gains) == pytest.approx([100 * (f / n - 1) for n, f in (
        (200, 250), (400, 520), (500, 660)
    )])  # fmt: skip
    write(tmp_path / "time", SCENARIOS["time saved"])
    saved = {row["method"]: float(row["time_saved_percent"]) for row in csv_rows(tmp_path / "time")}
    assert saved == pytest.approx({"none": 0.0, "apf": 25.0, "lisa": -25.0})
    write(tmp_path / "top1", SCENARIOS["pictures"])
    assert [row["top1_percent"] for row in csv_rows(tmp_path / "top1")] == ["50.0", "62.5"]
    write(tmp_path / "loss", SCENARIOS["time to the loss of the running mean"])
    assert [row["seconds_to_none_loss"] for row in csv_rows(tmp_path / "loss")] == [
        "30.0", "24.0", "14.0", "never", "",
    ]  # fmt: skip


def test_the_window_is_told(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none")
    assert "running mean over 7 logged training losses" in rendered(tmp_path, window=7)


def test_what_was_set_aside_and_a_run_below_two_folders_count_once(tmp_path: Path) -> None:
    write_run(tmp_path / "a/b", "none", tokens_per_second=100.0)
    write_run(tmp_path / "set_aside/h", "none", tokens_per_second=999.0, seed=1)
    rows, _ = table(tmp_path, tmp_path / "a")
    assert rows[0]["runs"] == "1"


def test_rows_are_in_the_order_of_the_paper(tmp_path: Path) -> None:
    methods = ["timelyfreeze+apf", "none", "timelyfreeze", "autofreeze", "apf"]
    for schedule in ["own.csv", "ZBVZeroBubble", "1F1B", "GPipe", None, "Interleaved1F1B"]:
        for method in methods:
            write_run(tmp_path / f"{schedule}/{method}", method, schedule=schedule)
    rows, _ = table(tmp_path)
    assert [row["method"] for row in rows[:5]] == [
        "none", "apf", "autofreeze", "timelyfreeze", "timelyfreeze+apf",
    ]  # fmt: skip
    assert [row["schedule"] for row in rows[::5]] == [
        "GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "-", "own.csv",
    ]  # fmt: skip


LOSS_COLUMNS = "losses.csv has the columns step, "


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("summary.json", '{"method": "ap', "summary.json is not JSON"),
        ("summary.json", "[1]", "summary.json is list; it must be an object"),
        ("summary.json", '{"steps": 3}', "summary.json: the whole lacks method, model"),
        ("summary.json", '{"method": "a", "train_loss": "x"}', "train_loss is 'x'; it must be a n"),
        ("summary.json", '{"method": "a", "steps": true}', "steps is True; it must be a whole num"),
        ("summary.json", json.dumps({**WHAT, "method": "apf", "started_at": "noon"}), "noon"),
        ("settings.json", "[]", "settings.json is list; it must be an object"),
        ("scores.json", "[]", "scores.json: scores is []; it must be an object"),
        ("steps.csv", "step,freeze_ratio\n1,half\n", "steps.csv has the columns step, freeze_rat"),
        ("losses.csv", "step,train_loss\n1,2.0\n", f"{LOSS_COLUMNS}train_"),
        ("losses.csv", "step,seconds,train_loss\n1,2,low\n", f"{LOSS_COLUMNS}seconds, train_loss;"),
    ],
)
def test_what_cannot_be_read_is_named_and_the_rest_is_shown(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    write_run(tmp_path / "a", "none", tokens_per_second=100.0)
    broken = write_run(tmp_path / "b", "apf")
    (broken / name).write_text(text)
    rows, notes = table(tmp_path)
    assert [row["method"] for row in rows] == ["none"]
    (note,) = notes
    assert note.startswith(f"not read: {broken}: ")
    assert message in note


def test_the_csv_has_a_row_of_plain_values_for_each_run(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", tokens_per_second=4000.0, data_seed=7)
    write_run(
        tmp_path / "b", "timelyfreeze", tokens_per_second=5000.0, batch_ms_predicted=80.0,
        batch_ms=100.0, stage_ratios={"0": 0.5, "1": 0.75}, all_frozen_batch_ms=60.5,
    )  # fmt: skip
    write_record(tmp_path / "c", 1)
    none, frozen, failed = sorted(csv_rows(tmp_path), key=lambda row: row["folder"])
    assert {field.name for field in fields(RunSummary)} <= none.keys()
    assert (none["tokens_per_second"], none["data_seed"], none["batch_ms"]) == ("4000.0", "7", "")
    assert (frozen["gain_percent"], frozen["batch_error_percent"]) == ("25.0", "25.0")
    assert (frozen["all_frozen_batch_ms"], frozen["device"]) == ("60.5", "some CPU, 2 cores")
    assert frozen["stage_ratios"] == '{"0": 0.5, "1": 0.75}'
    said = [failed[key] for key in ("method", "status", "tokens_per_second", "folder")]
    assert said == ["apf", "failed", "", str(tmp_path / "c")]


def test_every_benchmark_has_a_column_with_its_title() -> None:
    titles = {f"accuracy_{one.key}": f"{one.title}, %" for one in BENCHMARKS}
    assert {key: COLUMN_OF[key].title for key in titles} == titles


def test_columns_that_no_run_needs_are_not_there(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none")
    rows, notes = table(tmp_path)
    assert not [title for title in rows[0] if "accuracy" in title or "points" in title]
    assert not {"on", "top-1, %", "settings", "TruthfulQA mc2, %"} & rows[0].keys()
    assert notes == []


def test_a_partition_stands_for_the_cut_that_follows_from_it(tmp_path: Path) -> None:
    """Not the list of all modules; a run without one is told as such."""
    cut = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]
    for name, parallelism in {
        "a": {"partition": "", "module_fqns_per_model_part": None},
        "b": {"partition": "parameters", "module_fqns_per_model_part": cut},
    }.items():
        write_run(tmp_path / name, "none", settings={"parallelism": parallelism})
    variants = {run.apart for run in compare(find_runs([tmp_path]).runs, Criteria())}
    assert variants == {"partition parameters", "partition unset"}


@pytest.mark.parametrize(("is_emulated", "ends"), [(False, [2, 8, 14]), (True, [1, 6, 11])])
def test_moves_of_an_elastic_run_take_their_time(
    tmp_path: Path, is_emulated: bool, ends: list[int]
) -> None:
    """Two seconds a step, one by the virtual clock; four for each of two moves."""
    folder = write_run(
        tmp_path / "a", "fixed", losses=[(2, 4.0), (4, 3.0), (6, 2.0)], seconds=6.0,
        moves_seconds=8.0, emulated_ranks=4 if is_emulated else None,
    )  # fmt: skip
    steps = [StepRow(n, "stable", 2.0 * n, 2e3, 10.0, virtual_step_ms=1e3) for n in (1, 2, 3)]
    STEPS.write(folder, steps)
    MOVES.write(folder, [Move(step, 5, 2, 2, "5 1", 4.0) for step in (2, 3)])
    run = read_run(folder)
    assert run.by_virtual_clock == is_emulated
    assert run.seconds == ends[-1]
    assert run.step_ends == ends
    assert [seconds for seconds, _ in run.losses] == ends
    assert [seconds for seconds, _ in run.validation_losses] == ends
