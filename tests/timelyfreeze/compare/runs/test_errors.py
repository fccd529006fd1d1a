"""Standard errors of comparisons over the held-out parts that two runs share."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.timelyfreeze.compare.run_folders import write_run
from tests.timelyfreeze.compare.tables import table
from timelyfreeze.compare.runs.errors import Curve, HeldOut, held_out, paired_errors
from timelyfreeze.records.held_out import HELD_OUT, HeldOutRow

N_PARTS = 60
TARGETS = tuple(np.random.default_rng(3).integers(50, 128, N_PARTS).tolist())
HARD = np.random.default_rng(4).normal(1.5, 0.4, N_PARTS)  # some rows are hard for every model
OWN = np.random.default_rng(5).normal(0.0, 0.01, N_PARTS)


def of(*losses: np.ndarray, targets: Sequence[int] = TARGETS) -> HeldOut:
    seconds = tuple(float(i + 1) for i in range(len(losses)))
    return HeldOut(seconds, tuple(targets), tuple(tuple(each.tolist()) for each in losses))


def difference(own: Curve, nones: Curve) -> float:
    return own[-1][1] - nones[-1][1]


def test_a_difference_has_the_error_of_its_pairs() -> None:
    """The formula of a ratio for the differences, which are 40 times as small as the losses."""
    own, nones = of(HARD + OWN), of(HARD)
    (found,) = paired_errors(own, nones, {"difference": difference}).values()
    weights = np.array(TARGETS)
    residuals = weights * (OWN - (weights * OWN).sum() / weights.sum())
    want = math.sqrt((residuals**2).sum() * N_PARTS / (N_PARTS - 1)) / weights.sum()
    assert found == pytest.approx(want, rel=0.1)


def test_two_runs_on_the_same_losses_have_no_error() -> None:
    assert paired_errors(of(HARD), of(HARD), {"difference": difference}) == {"difference": 0.0}


def test_a_metric_that_some_draws_lack_has_none() -> None:
    def sometimes(own: Curve, nones: Curve) -> float | str:
        return 1.0 if difference(own, nones) > 0.0 else "never"

    statistics_of = {"sometimes": sometimes, "difference": difference}
    found = paired_errors(of(HARD + OWN - OWN.mean()), of(HARD), statistics_of)
    assert found["sometimes"] is None
    assert found["difference"] > 0.0


@pytest.mark.parametrize("other", [None, of(HARD[1:], targets=TARGETS[1:])])
def test_runs_that_share_no_parts_have_no_errors(other: HeldOut | None) -> None:
    assert paired_errors(of(HARD), other, {"difference": difference}) == {}


def test_a_table_becomes_curves_and_one_of_unequal_parts_none() -> None:
    table = [HeldOutRow(s, i, n, loss) for s in (1, 4) for i, n, loss in ((0, 3, 2.0), (1, 1, s))]
    found = held_out(table, {1: 0.5, 4: 2.5, 9: 7.0})
    assert found == HeldOut((0.5, 2.5), (3, 1), ((2.0, 1.0), (2.0, 4.0)))
    assert found.curve(np.array([1, 1])) == [(0.5, 1.75), (2.5, 2.5)]
    assert found.curve(np.array([0, 2])) == [(0.5, 1.0), (2.5, 4.0)]
    assert held_out(table[:3], {1: 0.5, 4: 2.5}) is None
    assert held_out(table, {1: 0.5}) is None
    assert held_out([], {}) is None


def test_the_table_tells_when_a_run_got_there_and_how_sure_it_is(tmp_path: Path) -> None:
    """None falls from 2 to 1 in 10 s; the other one is at 1.1 after 4 s and at 0.9 after 8 s."""
    noise = np.array([0.5, -0.5, 0.25, -0.25])  # of rows, the same in both
    own_noise = np.array([0.02, -0.02, 0.02, -0.02])
    curves = {"none": [(1.0, 2.0), (5.0, 1.5), (10.0, 1.0)],
              "apf": [(1.0, 2.0), (4.0, 1.1), (8.0, 0.9)]}  # fmt: skip
    for method, curve in curves.items():
        folder = write_run(tmp_path / method, method, seconds=curve[-1][0], steps=3, steps_done=3)
        rows = [f"{i},{seconds},,{loss}" for i, (seconds, loss) in enumerate(curve, 1)]
        (folder / "losses.csv").write_text(
            "\n".join(["step,seconds,train_loss,validation_loss", *rows, ""])
        )
        own = own_noise if method == "apf" else 0.0
        HELD_OUT.write(folder, [
            HeldOutRow(i, part, 10, loss)
            for i, (_, mean) in enumerate(curve, 1)
            for part, loss in enumerate(mean + noise + (own if i == 3 else 0.0))
        ])  # fmt: skip
    none, apf = table(tmp_path)[0]
    # At 1.05, 1.02 and 1.0: a quarter, four tenths and half of the way from 1.1 to 0.9.
    assert apf["time to 95% of none's fall"] == "0.500"
    assert apf["time to 98% of none's fall"] == "0.560"
    assert apf["time to none's loss over none's"] == "0.600"
    assert none["time to 95% of none's fall"] == "0.950"
    assert apf["learned, % of none"] == "110.0"
    assert apf["validation loss over none"] == "-0.1000"
    # Of four parts 0.02 away from their mean: 0.02 / sqrt(4 - 1), but for 400 draws.
    assert 0.009 < float(apf["standard error over none"]) < 0.0125
    assert 0.9 < float(apf["standard error of learned, %"]) < 1.25
    assert none["standard error over none"] == "-"
