"""``timelyfreeze plan``: tables, files, exit status, and what it does without."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.timelyfreeze.helpers.programs import noisy_bounds
from tests.tools.golden import assert_golden, assert_only
from timelyfreeze.cli.plan import main
from timelyfreeze.control.plans.planner import Planner
from timelyfreeze.planning import chosen_plan
from timelyfreeze.schedule.dag import build_dag
from timelyfreeze.schedule.order import one_f_one_b_order, order_to_csv
from timelyfreeze.settings import FreezeSettings
from timelyfreeze.whatif.bounds_file import PipelineMetadata, bounds_file_text
from timelyfreeze.whatif.times import StageTimes, bounds_from_times

ROOT = Path(__file__).resolve().parents[3]
TIMES = StageTimes(2.0, 4.0, 2.0, 2.0, 2.0, 0.0)


@pytest.fixture
def bounds(tmp_path: Path) -> Path:
    """A bounds file of four even stages with 2 layers each, with no order beside it."""
    dag = build_dag(one_f_one_b_order(4, 8))
    path = tmp_path / "bounds.json"
    notes = PipelineMetadata(ranks=4, first_stage="per_tensor", layers=(2, 2, 2, 2))
    path.write_text(bounds_file_text(dag, bounds_from_times(dag, [TIMES] * 4), notes))
    return path


def test_a_run_may_be_named_by_its_folder_or_the_only_one_there_is(
    bounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "outputs" / "tb" / "20260102_a"
    run.mkdir(parents=True)
    (run / "settings.json").touch()
    assert main([str(run)]) == 2
    said = capsys.readouterr().err
    assert f"{run / 'bounds.json'} cannot be read: No such file" in said
    assert "timelyfreeze profile" in said
    bounds.rename(run / "bounds.json")
    for place in (run, run.parent, tmp_path / "outputs"):
        assert main([str(place), "--schedules", "GPipe", "--r-max", "1"]) == 0
    other = run.with_name("20260103_b")
    other.mkdir()
    (other / "settings.json").touch()
    assert main([str(tmp_path / "outputs")]) == 2
    assert f"outputs holds 2 runs; name one, such as the last, {other}" in capsys.readouterr().err


def test_a_table_and_the_same_in_files(
    bounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = tmp_path / "plan.json", tmp_path / "plan.csv"
    arguments = [str(bounds), "--schedules", "GPipe", "1F1B", "--r-max", "0.5", "1"]
    assert main([*arguments, "--json", str(files[0]), "--csv", str(files[1])]) == 0
    text = capsys.readouterr().out
    # 11 slots of 6 ms; with everything frozen of 4 ms.
    assert "step ms 66.0" in text
    assert "most +50.0%" in text
    data = json.loads(files[0].read_text())
    assert data["n_ranks"] == 4
    assert [(c["schedule"], c["max_freeze_ratio"]) for c in data["cases"]] == [
        ("GPipe", 0.5), ("GPipe", 1.0), ("1F1B", 0.5), ("1F1B", 1.0),
    ]  # fmt: skip
    rows = list(csv.DictReader(files[1].read_text().splitlines()))
    assert [float(row["frozen_step_ms"]) for row in rows] == [
        case["frozen_step_ms"] for case in data["cases"]
    ]
    assert rows[0]["layers"] == "2 2 2 2"
    assert len(rows[0]["stage_ratios"].split()) == 4
    assert rows[0]["tokens_per_second"] == ""
    lines = [line.split() for line in text.splitlines() if line.strip().startswith("GPipe")]
    assert [line[1] for line in lines] == ["0.5", "1"]
    assert text.startswith("freezing does not pay") or text.startswith("freezing pays")
    assert max(map(len, text.splitlines())) <= 100


def test_the_best_of_several_files_is_told_first(
    bounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(bounds.read_text())
    data["captured"], data["captured_mean"], data["pipeline"]["gradient_rank"] = 0.6, 0.8, 32
    other = tmp_path / "with_a_rank.json"
    other.write_text(json.dumps(data))
    arguments = ["--schedules", "1F1B", "--r-max", "auto"]
    assert main([str(bounds), str(other), *arguments]) == 0
    text = capsys.readouterr().out
    first = text.partition(f"{bounds}: 4 stages")[0]
    assert "rank 32" in first
    assert "\ngradient_rank = 32\n" in first
    assert main([str(other), *arguments]) == 0
    assert capsys.readouterr().out.startswith(first)
    with pytest.raises(SystemExit):
        main([str(bounds), str(other), "--json", str(tmp_path / "plan.json")])
    assert "argument --json: it takes one BOUNDS" in capsys.readouterr().err


@pytest.mark.parametrize("first_stage", ["all_or_nothing", "per_tensor"])
def test_the_plan_of_the_pipeline_that_was_measured_is_that_of_the_run(
    tmp_path: Path, first_stage: str
) -> None:
    """Noise of 2% decides which of alike backwards are frozen, and which are skipped then."""
    order = one_f_one_b_order(4, 8)
    dag = build_dag(order)
    (tmp_path / "schedule.csv").write_text(order_to_csv(order))
    settings = FreezeSettings(max_freeze_ratio=0.25, gradient_rank=0, first_stage=first_stage)
    choices = Planner(order, settings, settings.phases, None).choices  # type: ignore[arg-type]
    for seed in range(5):
        bounds = noisy_bounds(dag, seed, 0.02)
        notes = PipelineMetadata(first_stage=first_stage)
        (tmp_path / "bounds.json").write_text(bounds_file_text(dag, bounds, notes))
        arguments = ["--schedules", "1F1B", "--r-max", "0.25", "--json", str(tmp_path / "plan")]
        assert main([str(tmp_path / "bounds.json"), *arguments]) == 0
        (case,) = json.loads((tmp_path / "plan").read_text())["cases"]
        run = chosen_plan(dag, bounds, choices)
        assert (case["step_ms"], case["frozen_step_ms"]) == (run.unfrozen_batch_ms, run.batch_ms)


@pytest.mark.parametrize(
    ("factor", "options", "said"),
    [
        (None, [], "a device or core of its own for each rank; interval unknown"),
        (1.25, ["--processors", "2"],
         "4 ranks that share 2 cores; 9 of 10 batches within -20.0% to +25.0% if the machine goes "
         "on as measured, as those of the measured run"),
    ],
)  # fmt: skip
def test_predictions_say_for_what_they_hold(
    bounds: Path, capsys: pytest.CaptureFixture[str], factor: float | None, options: list[str],
    said: str,
) -> None:  # fmt: skip
    bounds.write_text(json.dumps(json.loads(bounds.read_text()) | {"interval_factor": factor}))
    assert main([str(bounds), "--schedules", "1F1B", "--r-max", "0.5", *options]) == 0
    assert f"predictions hold for {said}" in capsys.readouterr().out.replace("\n", " ")


def test_the_order_beside_is_used(bounds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bounds.parent / "schedule.csv").write_text(order_to_csv(one_f_one_b_order(4, 8)))
    assert main([str(bounds), "--schedules", "1F1B"]) == 0
    text = capsys.readouterr().out.replace("\n", " ")
    assert "the measured pipeline without freezing: 66.0 ms a batch" in text
    assert "66.0 ms (+0.0%) from the times of its stages" in text


def test_many_stages_are_summed_up_in_the_terminal_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dag = build_dag(one_f_one_b_order(9, 9))
    path, file = tmp_path / "bounds.json", tmp_path / "plan.json"
    notes = PipelineMetadata(ranks=9, first_stage="per_tensor", layers=(2,) * 9)
    path.write_text(bounds_file_text(dag, bounds_from_times(dag, [TIMES] * 9), notes))
    split = "3,2,2,2,2,2,2,2,1"
    arguments = ["--schedules", "GPipe", "--splits", split, "--r-max", "1", "--json", str(file)]
    assert main([str(path), *arguments]) == 0
    table = capsys.readouterr().out.partition("\n-----")[2]
    assert "  1 to 3  " in table
    case = json.loads(file.read_text())["cases"][0]
    assert (len(case["stage_ratios"]), case["layers"]) == (9, [3, 2, 2, 2, 2, 2, 2, 2, 1])


def test_the_profile_in_the_repository_can_be_planned_from(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = ROOT / "profiles" / "tiny_8m_1F1B" / "bounds.json"
    arguments = ["--splits", "default", "balanced", "--schedules", "GPipe", "1F1B"]
    assert main([str(path), *arguments]) == 0
    assert "2,3,3,2" in capsys.readouterr().out


ERRORS = """\
--r-max 1.5
--r-max nan
--ranks 1
--microbatches 0
--processors -1
--p2p-overhead-ms -1
--outside-ms inf
--batches 0
--time-limit-s 0
--splits best
--layers 2,2
--layers 3,2,2,1
--layers 2;2
--schedules nosuch
--csv /nosuch/folder/plan.csv
--frozen-layers 0
--frozen-layers 2 --r-max 0.5
--frozen-layers 2 --outside-ms 3
--shrink-by time
--link-gb-per-s 10
--frozen-layers 2 --shrink-by memory
--frozen-layers 8
--frozen-layers 2 --layers 3,3
""".splitlines()


@pytest.mark.parametrize("words", ERRORS)
def test_errors_are_told_with_their_option(
    bounds: Path, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main([str(bounds), "--schedules", "1F1B", *words.split()])
    except SystemExit as error:  # argparse
        status = error.code
    assert status == 2
    _, told = capsys.readouterr().err.split("error: ")
    told, *_ = told.rstrip().split(" (choose from")  # which Pythons write in several ways
    assert_golden("plan_errors.txt", words, told.replace(str(bounds.parent), "FOLDER") + "\n")


def test_every_error_that_is_expected_is_told() -> None:
    assert_only("plan_errors.txt", ERRORS)


def test_a_file_that_does_not_say_its_ranks(
    tmp_path: Path, bounds: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(bounds.read_text())
    del data["pipeline"]
    bounds.write_text(json.dumps(data))
    assert main([str(bounds)]) == 2
    error = capsys.readouterr().err
    assert "does not say how many ranks its 4 stages are on" in error
    assert "tell with --ranks" in error
    assert main([str(bounds), "--ranks", "4", "--schedules", "1F1B"]) == 0
    assert "tell with --layers" in capsys.readouterr().out.replace("\n", " ")


def test_a_broken_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"actions": {}}')
    assert main([str(path)]) == 2
    captured = capsys.readouterr()
    assert f"error: {path}: no bounds file" in captured.err
    assert captured.out == ""


def test_a_laptop_needs_no_torch(bounds: Path) -> None:
    program = (
        "import sys; from timelyfreeze.cli.plan import main; "
        f"words = [{str(bounds)!r}, '--schedules', 'GPipe', '1F1B']; "
        "status = main(words) or main([*words, '--frozen-layers', '3']); "
        "assert 'torch' not in sys.modules and 'torchtitan' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "shortest step with freezing" in done.stdout
    assert "run-ahead" in done.stdout
