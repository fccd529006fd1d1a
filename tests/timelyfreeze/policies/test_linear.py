import pytest

from tests.timelyfreeze.helpers.toy_model import (
    assert_resumes,
    prefix_length,
    run,
    toy_layout,
)
from timelyfreeze.policies.linear import Linear
from timelyfreeze.policies.policy import Check


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Linear(), [0, 1, 2, 3, 4, 4, 4]),
        (Linear(layers_per_check=2), [0, 2, 4, 4, 4, 4, 4]),
        (Linear(layers_per_check=2, max_layers=3), [0, 2, 3, 3, 3, 3, 3]),
        (Linear(max_layers=5), [0, 1, 2, 3, 4, 5, 5]),
        (Linear(max_layers=0), [0] * 7),
    ],
)
def test_layers_freeze_at_a_steady_pace(policy: Linear, expected: list[int]) -> None:
    decisions = run(policy, toy_layout(5), [{}] * 6)
    assert [prefix_length(d.frozen) for d in decisions] == expected
    assert [d.metrics for d in decisions] == [{"frozen_layers": k} for k in expected]


def test_a_resumed_run_decides_the_same() -> None:
    assert_resumes(Linear(), toy_layout(5), [{}] * 6)


def test_more_layers_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match=r"linear\.max_layers is 6; the model has 5"):
        Linear(max_layers=6).start(Check(0, toy_layout(5), {}, 0))


def test_it_measures_nothing() -> None:
    assert Linear().measurement is None
