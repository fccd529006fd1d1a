"""A reference run of seven logged losses: means of five are 5, 4 and 3.2, at 5, 6 and 7 seconds."""

import csv
import json
import math
from pathlib import Path

import pytest

from tests.torchtitan.helpers.report_runs import end_step, log_step, run_in
from timelyfreeze.control.collected import CollectedMetrics
from timelyfreeze.settings.phases import Phase
from torchtitan.freezing.checks import ConfigError, check
from torchtitan.freezing.report.losses import FiniteWatch, Losses, Reference, read_reference
from torchtitan.settings.job_config import JobConfig


def test_every_row_is_on_disk_at_once(tmp_path: Path) -> None:
    """A loss is logged before its step has ended, so its row comes with the time of the step."""
    path, losses = tmp_path / "losses.csv", Losses(run_in(tmp_path))
    assert path.read_text() == "step,seconds,train_loss,validation_loss\n"
    log_step(losses, 1, 7.625)
    end_step(losses, 1, None, 0.5)
    assert path.read_text().splitlines()[1:] == ["1,0.500,7.625,"]
    losses.log_validation(1, 7.25, {})
    end_step(losses, 2, None, 11.8)
    log_step(losses, 10, 0.1)
    end_step(losses, 10, None, 0.0456)
    assert path.read_text().splitlines()[1:] == [
        "1,0.500,7.625,",
        "1,0.500,,7.25",
        "10,12.346,0.1,",
    ]


def test_losses_keep_all_their_digits(tmp_path: Path) -> None:
    losses = Losses(run_in(tmp_path))
    for step, loss in ((3, 1 / 3), (4, math.nan)):
        log_step(losses, step, loss)
        end_step(losses, step, None, 1.0)
    with (tmp_path / "losses.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[0]["train_loss"]) == 1 / 3
    assert rows[0]["validation_loss"] == ""
    assert rows[1]["train_loss"] == "nan"


@pytest.mark.parametrize(
    ("logged", "n_steps", "train_loss"),
    [
        ([], 20, None),
        ([(1, 9.0), (10, 5.0), (18, 4.0), (19, 3.0), (20, 1.0)], 20, 2.0),  # steps 19 and 20
        ([(1, 9.0), (10, 5.0)], 19, 5.0),  # none in step 19
        ([(1, 9.0), (2, 4.0)], 2, 4.0),  # at least one step
        ([(25, 2.0), (30, 1.0)], 35, 1.0),  # steps 33 to 35
    ],
)
def test_the_training_loss_is_that_of_the_last_tenth(
    tmp_path: Path, logged: list[tuple[int, float]], n_steps: int, train_loss: float | None
) -> None:
    losses = Losses(run_in(tmp_path))
    for step, loss in logged:
        log_step(losses, step, loss)
    end_step(losses, n_steps, None, 1.0)
    found = losses.fields(losses.run.start)
    assert found.get("train_loss") == train_loss
    assert found.get("last_loss") == (logged[-1][1] if logged else None)


def test_the_last_validation_counts_and_each_of_a_classifier_has_a_row(tmp_path: Path) -> None:
    losses = Losses(run_in(tmp_path))
    assert losses.fields(losses.run.start) == {}
    losses.log_validation(20, 3.0, {"validation_metrics/top1": 0.5, "other": 1.0})
    want = {"validation_loss": 3.0, "validation_error": None, "validation_top1": 0.5}
    assert losses.fields(losses.run.start) == want
    assert not (tmp_path / "accuracies.csv").exists(), "it takes both"
    for step, seconds, top1, top5 in ((40, 12.5, 0.25, 0.75), (80, 25.0, 0.5, 1.0)):
        losses.run.seconds = seconds
        scores = {"validation_metrics/top1": top1, "validation_metrics/top5": top5}
        losses.log_held_out(step, [(10, 1.5), (10, 2.5)])
        losses.log_validation(step, 2.0, scores)
    assert (tmp_path / "accuracies.csv").read_text().splitlines() == [
        "step,seconds,top1,top5", "40,12.5,0.25,0.75", "80,25,0.5,1",
    ]  # fmt: skip
    assert (tmp_path / "held_out.csv").read_text().splitlines() == [
        "step,part,targets,loss", "40,0,10,1.5", "40,1,10,2.5", "80,0,10,1.5", "80,1,10,2.5",
    ]  # fmt: skip
    want = {
        "validation_loss": 2.0,
        "validation_error": pytest.approx(0.5),
        "validation_top1": 0.5,
        "validation_top5": 1.0,
    }
    assert losses.fields(losses.run.start) == want


@pytest.mark.parametrize(
    ("loss", "norm"),
    [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, -math.inf), (math.nan, math.nan)],
)
def test_a_spell_is_told_once_with_what_was_frozen(
    loss: float, norm: float, caplog: pytest.LogCaptureFixture
) -> None:
    watch = FiniteWatch(run_in())

    def told(step: int, loss: float, norm: float, phase: Phase, ratios: dict[int, float]) -> str:
        caplog.clear()
        log_step(watch, step, loss, phase, CollectedMetrics({}, ratios, 0.0), norm)
        return caplog.text

    assert not told(1, 2.0, 1.0, Phase.RAMP, {0: 0.1})
    warning = told(2, loss, norm, Phase.STABLE, {0: 0.25, 1: 0.8})
    assert f"Step 2 has loss {loss:g} and gradient norm {norm:g}, in freezing " in warning
    assert "phase stable, frozen of each stage: 0:0.25 1:0.80" in warning
    assert "freezing.max_freeze_ratio" in warning
    assert not told(3, loss, norm, Phase.STABLE, {0: 0.25})
    assert not told(4, 2.0, 1.0, Phase.STABLE, {0: 0.25})
    assert told(5, loss, norm, Phase.STABLE, {0: 0.25}), "another spell"


def test_without_freezing_nothing_is_said_of_it(caplog: pytest.LogCaptureFixture) -> None:
    log_step(FiniteWatch(run_in()), 7, math.nan)
    (message,) = caplog.messages
    assert "freezing" not in message
    assert "optimizer.lr" in message


LOSSES = [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 2.0]
HEAD = "step,seconds,train_loss,validation_loss\n"


def run_folder(place: Path, losses: list[float], *, seconds: float = 1.0) -> Path:
    place.mkdir()
    rows = [f"{i},{i * seconds},{loss},\n" for i, loss in enumerate(losses, 1)]
    (place / "losses.csv").write_text(HEAD + "".join(rows) + "7,99.0,,1.5\n")
    return place


def test_a_reference_is_its_last_mean_and_when_it_got_there(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", LOSSES)
    assert read_reference(folder) == {
        "reference_run": str(folder),
        "reference_device": None,
        "reference_loss": pytest.approx(3.2),
        "reference_seconds": 7.0,
    }
    (folder / "summary.json").write_text(json.dumps({"device": "Abacus 3000"}))
    assert read_reference(folder)["reference_device"] == "Abacus 3000"
    # Means 5, 3.6, 4.2: its last mean was reached before the end.
    early = run_folder(tmp_path / "early", [7.0, 6.0, 5.0, 4.0, 3.0, 0.0, 9.0])
    found = read_reference(early)
    assert (found["reference_loss"], found["reference_seconds"]) == (4.2, 6.0)


def test_when_its_loss_was_reached(tmp_path: Path) -> None:
    reference = run_folder(tmp_path / "run", LOSSES)

    def reached(folder: Path) -> float | None:
        run = run_in(folder)
        run.config.report.reference_run = str(reference)
        found: float | None = Reference(run).fields(run.start)["seconds_to_reference_loss"]
        return found

    fast = run_folder(tmp_path / "fast", [4.0, 4.0, 4.0, 2.0, 2.0, 2.0], seconds=0.5)
    assert reached(fast) == 2.5
    assert reached(run_folder(tmp_path / "slow", [4.0] * 9)) is None


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        (None, "which is no folder; name that of a run"),
        ("", r"which has no losses\.csv; name that of a run"),
        ("what\n1\n", "which cannot be read"),
        (HEAD + "1,1.0,5.0,\n", "which has 1 logged training losses; its last 5 must be there"),
        (HEAD + "1,1.0,nan,\n" * 6, "must be there and be numbers"),
    ],
)
def test_what_is_no_reference_is_told_before_the_run(
    tmp_path: Path, losses: str | None, message: str
) -> None:
    config = JobConfig()
    config.report.reference_run = str(tmp_path / "run")
    if losses is not None:
        (tmp_path / "run").mkdir()
        if losses:
            (tmp_path / "run" / "losses.csv").write_text(losses)
    with pytest.raises(ConfigError, match=rf"report\.reference_run is .*{message}"):
        check(config)


def test_a_run_that_is_there_is_no_error(tmp_path: Path) -> None:
    config = JobConfig()
    config.report.reference_run = str(run_folder(tmp_path / "run", LOSSES))
    check(config)
