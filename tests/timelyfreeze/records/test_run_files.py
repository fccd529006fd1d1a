"""Files of a run, read back from text written by hand."""

import json
from pathlib import Path

import pytest

from timelyfreeze.records.tables import (
    COUNTS,
    FRONT,
    LOSSES,
    MOVES,
    PLASTICITY,
    RESPONSES,
    STEPS,
    FrontRow,
    FrozenCount,
    LossRow,
    Move,
    PlasticityRow,
    ResponseRow,
    StepRow,
    last_running_mean,
    never_updated,
    read_responses,
    running_means,
    seconds_to_reach,
)

STEPS_TEXT = """\
step,phase,seconds,step_ms,tokens_per_second,virtual_step_ms,freeze_ratio,batch_ms,\
batch_predicted_ms,train_loss,kappa,p_eff
1,warmup,0.5,500,100,,0,,,7.25,,1
2,stable,0.75,250,200,,0.5,240,236.5,7,0.5,0.625
"""


def test_steps(tmp_path: Path) -> None:
    rows = [
        StepRow(1, "warmup", 0.5, 500.0, 100.0, freeze_ratio=0.0, train_loss=7.25, p_eff=1.0),
        StepRow(2, "stable", 0.75, 250.0, 200.0, None, 0.5, 240.0, 236.5, 7.0, 0.5, 0.625),
    ]
    STEPS.write(tmp_path, rows[:1])
    STEPS.append(tmp_path, rows[1:])
    assert (tmp_path / "steps.csv").read_text() == STEPS_TEXT
    assert STEPS.read(tmp_path) == rows


FRONT_TEXT = """\
step,phase,frozen_layers,batches,read,frozen_modules,bootstrapping
1,warmup,0,1,,0,1
2,stable,3,4,2,1,0
"""


def test_the_front(tmp_path: Path) -> None:
    rows = [FrontRow(1, "warmup", 0, 1, None, 0, 1), FrontRow(2, "stable", 3, 4, 2, 1, 0)]
    FRONT.write(tmp_path, rows)
    assert (tmp_path / "front.csv").read_text() == FRONT_TEXT
    assert FRONT.read(tmp_path) == rows
    (tmp_path / "front.csv").write_text(FRONT_TEXT.replace("3,4,2", "3,4,5"))
    with pytest.raises(ValueError, match=r"line 3: read is 5; it must not be above batches \(4\)"):
        FRONT.read(tmp_path)


def test_plasticity(tmp_path: Path) -> None:
    rows = [PlasticityRow(14, 0, 0.5, 0.25), PlasticityRow(16, 1, 1e-06, 2e-06)]
    PLASTICITY.write(tmp_path, rows)
    assert PLASTICITY.read(tmp_path) == rows
    head = (tmp_path / "plasticity.csv").read_text().splitlines()[0]
    assert head == "step,module,plasticity,smoothed"


def test_losses(tmp_path: Path) -> None:
    path = tmp_path / "losses.csv"
    path.write_text("step,seconds,train_loss,validation_loss\n5,1.500,2.5,\n5,1.500,,2.75\n")
    assert LOSSES.read(tmp_path) == [LossRow(5, 1.5, 2.5, None), LossRow(5, 1.5, None, 2.75)]
    path.write_text("step,loss\n5,2\n")
    with pytest.raises(ValueError, match=r"has the columns step, loss; not step, seconds"):
        LOSSES.read(tmp_path)


def test_running_means() -> None:
    assert running_means([1.0, 3.0, 5.0, 1.0], 2) == [2.0, 4.0, 3.0]
    assert running_means([1.0], 2) == []


def test_when_a_loss_was_reached() -> None:
    curve = [(1.0, 8.0), (2.0, 6.0), (3.0, 7.0), (4.0, 3.0), (5.0, 1.0)]
    # Means of two: 7, 6.5, 5, 2
    assert last_running_mean(curve, 2) == 2.0
    assert seconds_to_reach(curve, 5.0, 2) == 4.0
    assert seconds_to_reach(curve, 7.5, 2) == 2.0
    assert seconds_to_reach(curve, 1.9, 2) is None
    assert last_running_mean(curve, 6) is None
    assert seconds_to_reach(curve, 9.0, 6) is None
    assert last_running_mean([(1.0, float("nan"))], 1) is None


def test_counts_and_what_was_never_updated(tmp_path: Path) -> None:
    counts = [
        FrozenCount(0, 0, "a", 10, 8, 8),
        FrozenCount(0, 0, "b", 30, 8, 2),
        FrozenCount(1, 1, "c", 40, 8, 7),
        FrozenCount(1, 1, "d", 20, 8, 8),
    ]
    COUNTS.write(tmp_path, counts)
    text = (tmp_path / "frozen_counts.csv").read_text()
    assert text.splitlines()[:2] == [
        "rank,stage,parameter,elements,backwards,times_frozen",
        "0,0,a,10,8,8",
    ]
    assert COUNTS.read(tmp_path) == counts
    assert [count.frequency for count in counts] == [1.0, 0.25, 0.875, 1.0]
    assert never_updated(counts) == {
        "never_updated_tensors": 0.5,
        "never_updated_elements": 0.3,
    }


def test_before_freezing_nothing_is_said_to_be_never_updated() -> None:
    assert never_updated([FrozenCount(0, 0, "a", 10, 0, 0)]) == {}
    assert FrozenCount(0, 0, "a", 10, 0, 0).frequency == 0.0


def test_responses_of_a_run(tmp_path: Path) -> None:
    rows = [ResponseRow(0, "B", "ramp", 3, 0.5, 12.5)]
    RESPONSES.write(tmp_path, rows)
    assert read_responses(tmp_path) == rows


def test_responses_of_a_profile(tmp_path: Path) -> None:
    def stage(number: int, mode: str | None) -> dict:
        points = [
            {"ratio": 0.0, "fraction": 0.0, "median_ms": 9.0, "quartiles_ms": [8, 10], "n": 5},
            {"ratio": 0.5, "fraction": 0.49, "median_ms": 6.0, "quartiles_ms": [5, 7], "n": 5},
        ]
        curves = {"B": {"line": {}, "points": points}}
        return {"stage": number, "first_stage": mode, "curves": curves}

    profile = {"stages": [stage(0, "per_tensor"), stage(1, None)], "probes": []}
    (tmp_path / "response.json").write_text(json.dumps(profile))
    assert read_responses(tmp_path) == [
        ResponseRow(0, "B", "profile per_tensor", -1, 0.0, 9.0),
        ResponseRow(0, "B", "profile per_tensor", -1, 0.49, 6.0),
        ResponseRow(1, "B", "profile", -1, 0.0, 9.0),
        ResponseRow(1, "B", "profile", -1, 0.49, 6.0),
    ]
    (tmp_path / "response.json").write_text("{}")
    with pytest.raises(ValueError, match="is not what a profile writes"):
        read_responses(tmp_path)


def test_the_profile_that_comes_with_the_project_can_be_read() -> None:
    folder = Path(__file__).parents[3] / "profiles/tiny_8m_1F1B"
    ways = {(row.stage, row.phase) for row in read_responses(folder)}
    assert {(0, "profile all_or_nothing"), (0, "profile per_tensor"), (3, "profile")} <= ways


def test_a_folder_without_responses_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"responses\.csv"):
        read_responses(tmp_path)


def test_a_line_for_each_move(tmp_path: Path) -> None:
    moves = [Move(13, 1, 4, 1, "3 2 2 3", 2.5), Move(37, 8, 2, 2, "8 2", 3.25)]
    MOVES.write(tmp_path, moves)
    assert (tmp_path / "moves.csv").read_text().splitlines() == [
        "step,frozen_layers,ranks,replicas,split,seconds",
        "13,1,4,1,3 2 2 3,2.5",
        "37,8,2,2,8 2,3.25",
    ]
    assert MOVES.read(tmp_path) == moves


@pytest.mark.parametrize(
    "line", ["0,1,4,1,4,1.0", "1,1,0,1,4,1.0", "1,1,4,0,4,1.0", "1,1,4,1,4,-1"]
)
def test_what_no_run_can_have_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "moves.csv").write_text(f"{','.join(MOVES.header)}\n{line}\n")
    with pytest.raises(ValueError, match=r"moves\.csv, line 2"):
        MOVES.read(tmp_path)
