"""A reference run of seven logged losses: means of five are 5, 4 and 3.2, at 5, 6 and 7 seconds."""

import csv
import json
import math
from pathlib import Path

import pytest

from timelyfreeze.records import AccuracyRow
from timelyfreeze.settings.phases import Phase
from torchtitan.freezing.checks import ConfigError, check
from torchtitan.freezing.config.job_config import JobConfig
from torchtitan.freezing.report.step_record import (
    FiniteWatch,
    LossCurve,
    Reference,
    add_accuracies,
    read_reference,
    seconds_to_loss_of,
)


def test_every_row_is_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "losses.csv"
    curve = LossCurve(path)
    assert path.read_text() == "step,seconds,train_loss,validation_loss\n"
    curve.add_train(1, 0.5, 7.625)
    assert path.read_text().splitlines()[1:] == ["1,0.500,7.625,"]
    curve.add_validation(1, 0.5, 7.25)
    curve.add_train(10, 12.3456, 0.1)
    assert path.read_text().splitlines()[1:] == [
        "1,0.500,7.625,",
        "1,0.500,,7.25",
        "10,12.346,0.1,",
    ]


def test_losses_keep_all_their_digits(tmp_path: Path) -> None:
    curve = LossCurve(tmp_path / "losses.csv")
    curve.add_train(3, 1.0, 1 / 3)
    curve.add_train(4, 2.0, float("nan"))
    with (tmp_path / "losses.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[0]["train_loss"]) == 1 / 3
    assert rows[0]["validation_loss"] == ""
    assert rows[1]["train_loss"] == "nan"


@pytest.mark.parametrize(
    ("loss", "norm"),
    [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, -math.inf), (math.nan, math.nan)],
)
def test_a_spell_is_told_once_with_what_was_frozen(loss: float, norm: float) -> None:
    watch = FiniteWatch()
    assert watch.note(1, 2.0, 1.0, Phase.RAMP, {0: 0.1}) is None
    warning = watch.note(2, loss, norm, Phase.STABLE, {0: 0.25, 1: 0.8})
    assert warning is not None
    assert warning.startswith(f"Step 2 has loss {loss:g} and gradient norm {norm:g}, in freezing ")
    assert "phase stable, frozen of each stage: 0:0.25 1:0.80" in warning
    assert "freezing.max_freeze_ratio" in warning
    assert watch.note(3, loss, norm, Phase.STABLE, {0: 0.25}) is None
    assert watch.note(4, 2.0, 1.0, Phase.STABLE, {0: 0.25}) is None
    assert watch.note(5, loss, norm, Phase.STABLE, {0: 0.25}) is not None, "another spell"


def test_without_freezing_nothing_is_said_of_it() -> None:
    warning = FiniteWatch().note(7, math.nan, 1.0)
    assert warning is not None
    assert "freezing" not in warning
    assert "optimizer.lr" in warning


LOSSES = [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 2.0]
HEAD = "step,seconds,train_loss,validation_loss\n"


def run_folder(place: Path, losses: list[float], *, seconds: float = 1.0) -> Path:
    place.mkdir()
    rows = [f"{i},{i * seconds},{loss},\n" for i, loss in enumerate(losses, 1)]
    (place / "losses.csv").write_text(HEAD + "".join(rows) + "7,99.0,,1.5\n")
    return place


def test_a_reference_is_its_last_mean_and_when_it_got_there(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", LOSSES)
    assert read_reference(folder) == Reference(folder, pytest.approx(3.2), 7.0, None)
    (folder / "summary.json").write_text(json.dumps({"device": "Abacus 3000"}))
    assert read_reference(folder).device == "Abacus 3000"
    # Means 5, 3.6, 4.2: its last mean was reached before the end.
    early = run_folder(tmp_path / "early", [7.0, 6.0, 5.0, 4.0, 3.0, 0.0, 9.0])
    assert (read_reference(early).loss, read_reference(early).seconds) == (4.2, 6.0)


def test_when_its_loss_was_reached(tmp_path: Path) -> None:
    reference = read_reference(run_folder(tmp_path / "run", LOSSES))
    fast = run_folder(tmp_path / "fast", [4.0, 4.0, 4.0, 2.0, 2.0, 2.0], seconds=0.5)
    assert seconds_to_loss_of(reference, fast) == 2.5
    assert seconds_to_loss_of(reference, run_folder(tmp_path / "slow", [4.0] * 9)) is None


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


def test_each_validation_of_a_classifier_has_a_row(tmp_path: Path) -> None:
    add_accuracies(tmp_path, AccuracyRow(40, 12.5, 0.25, 0.75))
    add_accuracies(tmp_path, AccuracyRow(80, 25.0, 0.5, 1.0))
    assert (tmp_path / "accuracies.csv").read_text().splitlines() == [
        "step,seconds,top1,top5", "40,12.5,0.25,0.75", "80,25,0.5,1",
    ]  # fmt: skip
