import math

import pytest

from tests.timelyfreeze.helpers.toy_model import only_error, prefix_length, run, toy_layout
from timelyfreeze.policies.fixed import Fixed
from timelyfreeze.policies.policy import Check


@pytest.mark.parametrize("layers", [0, 1, 3, 5])
def test_the_first_layers_are_frozen_from_the_start_to_the_end(layers: int) -> None:
    decisions = run(Fixed(layers), toy_layout(5), [{}] * 3)
    assert [prefix_length(d.frozen) for d in decisions] == [layers] * 4
    assert decisions[0].metrics == {"frozen_layers": layers}


def test_it_never_decides_anew() -> None:
    assert all(step % Fixed(2).check_interval for step in range(1, 10**6, 999))


def test_a_resumed_run_keeps_what_was_frozen() -> None:
    decisions = run(Fixed(2), toy_layout(5), [{}] * 3, through_json=True)
    assert [prefix_length(d.frozen) for d in decisions] == [2] * 4


def test_more_layers_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fixed\.layers is 6; the model has 5"):
        Fixed(6).start(Check(0, toy_layout(5), {}, 0))


@pytest.mark.parametrize("layers", [-1, math.nan])
def test_errors_are_named(layers: float) -> None:
    message = f"fixed.layers is {layers}; it must be 0 or more"
    assert only_error(Fixed(layers)) == message  # type: ignore[arg-type]


def test_sound_settings_have_no_errors() -> None:
    assert list(Fixed(0).errors()) == []
