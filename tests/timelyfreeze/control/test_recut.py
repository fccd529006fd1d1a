"""The state of a policy alone, gone on from where the model is cut into other stages."""

import pytest

from timelyfreeze.control.state import is_cut_alike, recut
from timelyfreeze.policies import ModelLayout, build_layout

# Five tensors; saved by three ranks, of which two hold the second stage.
SAVED = [
    {
        "applied": [6.0, 20],
        "tally": {"0": [4, [4, 3]]},
        "policy": {"frozen": [0]},
        "energy": {"0": [1.0, 2.0]},
    },
    {"applied": [3.0, 13], "tally": {"1": [4, [2, 1, 0]]}, "policy": {"frozen": [0]}},
    {
        "applied": [3.0, 13],
        "tally": {"1": [4, [2, 1, 0]]},
        "policy": {"frozen": [0]},
        "losses": {"1": [7.5, 3]},
    },
]


def layout(*n_tensors: int) -> ModelLayout:
    names = iter(range(sum(n_tensors)))
    return build_layout(
        {
            stage: [(f"layers.{next(names)}.w", 1) for _ in range(n)]
            for stage, n in enumerate(n_tensors)
        }
    )


def test_counts_go_where_the_tensors_are() -> None:
    cut = layout(3, 1, 1)
    states = [recut(SAVED, cut, [stage], stage, 3) for stage in range(3)]
    assert [state["tally"] for state in states] == [
        {"0": [4, [4, 3, 2]]},
        {"1": [4, [1]]},
        {"2": [4, [0]]},
    ]
    assert recut(SAVED, cut, [0, 2], 0, 2)["tally"] == {"0": [4, [4, 3, 2]], "2": [4, [0]]}


def test_the_decision_stays() -> None:
    state = recut(SAVED, layout(1, 4), [1], 1, 2)
    assert state["policy"] == {"frozen": [0]}
    assert state["losses"] == {"1": [7.5, 3]}


def test_energies_go_where_the_tensors_are() -> None:
    second = {"energy": {"1": [3.0, None, 5.0]}}
    saved = [SAVED[0], SAVED[1] | second, SAVED[2] | second]
    cut = layout(1, 2, 2)
    assert recut(saved, cut, [0, 2], 0, 2)["energy"] == {"0": [1.0], "2": [None, 5.0]}
    assert recut(saved, cut, [1], 1, 2)["energy"] == {"1": [2.0, 3.0]}


def test_energies_are_measured_anew_where_not_all_are_known() -> None:
    assert "energy" not in recut(SAVED, layout(1, 4), [1], 1, 2)


@pytest.mark.parametrize("n_processes", [1, 2, 3, 5])
def test_sums_are_handed_out_whole(n_processes: int) -> None:
    states = [recut(SAVED, layout(5), [0], i, n_processes) for i in range(n_processes)]
    assert sum(state["applied"][0] for state in states) == pytest.approx(12.0)
    assert sum(state["applied"][1] for state in states) == 46


def test_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"is of 5 tensors, the model has 6; resume with the same"):
        recut(SAVED, layout(3, 3), [0], 0, 2)


def test_a_cut_is_told_from_another() -> None:
    assert is_cut_alike(SAVED, layout(2, 3))
    assert not is_cut_alike(SAVED, layout(3, 2))
    assert not is_cut_alike(SAVED, layout(2, 2, 1))
