import math

import pytest

from timelyfreeze.settings.phases import Phase
from torchtitan.freezing.report.finite_watch import FiniteWatch


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
