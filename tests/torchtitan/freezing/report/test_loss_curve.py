import csv
from pathlib import Path

from torchtitan.freezing.report.loss_curve import LossCurve


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
