"""What a user may choose about packing."""

import pytest

from timelyfreeze.settings import PackingSettings


def test_batches_stay_unless_asked() -> None:
    assert not PackingSettings().is_on
    assert PackingSettings("performance").is_on
    assert not PackingSettings("performance").gives_back
    assert PackingSettings("efficiency").gives_back


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_learning_rate_of_a_step_with_four_times_the_rows(rule: str, factor: float) -> None:
    settings = PackingSettings("performance", learning_rate=rule)
    assert settings.rate_factor(4) == factor
    assert settings.rate_factor(1) == 1.0
    assert not list(settings.errors())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            PackingSettings("efficiency", max_global_batch=64),
            "packing.max_global_batch is 64; with packing.mode 'efficiency' steps keep their rows, "
            "so it must be 0",
        ),
        (
            PackingSettings("efficiency", learning_rate="sqrt"),
            "packing.learning_rate is 'sqrt'; with packing.mode 'efficiency' steps keep their "
            "rows, so it must be 'none'",
        ),
    ],
)
def test_what_makes_no_sense(settings: PackingSettings, message: str) -> None:
    assert list(settings.errors()) == [message]
