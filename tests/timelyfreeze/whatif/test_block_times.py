"""Times of layers that differ, worked out by hand, and splits against a search through all."""

import itertools
import json
import random
from pathlib import Path

import pytest

from tests.timelyfreeze.whatif.test_partition import all_splits
from timelyfreeze.cli.plan import main
from timelyfreeze.schedule.dag import build_dag
from timelyfreeze.schedule.order import one_f_one_b_order
from timelyfreeze.whatif.bounds_file import PipelineMetadata, bounds_file_text
from timelyfreeze.whatif.layer_model import BlockTimes, block_times
from timelyfreeze.whatif.partition import PartParameters, min_max_split, time_load
from timelyfreeze.whatif.times import StageTimes, bounds_from_times

# One layer, two, three and one; the first stage has no input gradient.
LAYERS = (1, 2, 3, 1)
STAGES = [
    StageTimes(4.0, 5.0, 1.0, 0.0, 5.0, 1.0),
    StageTimes(4.0, 8.0, 4.0, 4.0, 4.0, 0.0),
    StageTimes(3.0, 6.0, 3.0, 3.0, 3.0, 0.0),
    StageTimes(8.0, 16.0, 8.0, 8.0, 8.0, 0.0),
]


def test_what_was_measured_comes_back() -> None:
    model = block_times(STAGES, LAYERS)
    assert model.times(LAYERS) == tuple(STAGES)
    assert model.n_layers == 7
    for index, (start, stop) in enumerate(((0, 1), (1, 3), (3, 6), (6, 7))):
        assert model.stage(index, 4, start, stop) == STAGES[index]


def test_a_layer_takes_its_share_of_its_stage_along() -> None:
    first, second, third, last = block_times(STAGES, LAYERS).times((2, 2, 2, 1))
    # 4 + 2 forward; 5 + 4 backward, all of it in W, a fifth of it left when frozen.
    assert first == StageTimes(6.0, 9.0, pytest.approx(1.8), 0.0, 9.0, pytest.approx(1.8))
    assert second == StageTimes(3.0, 6.0, 3.0, 3.0, 3.0, 0.0)
    assert third == StageTimes(2.0, 4.0, 2.0, 2.0, 2.0, 0.0)
    assert last == STAGES[3]


def test_a_first_layer_further_back_has_an_input_gradient() -> None:
    """As large a part of its backward as in the second stage: half."""
    first, second, *_ = block_times(STAGES, LAYERS).times((0, 3, 3, 1))
    assert first == StageTimes()
    assert second == StageTimes(8.0, 13.0, 6.5, 6.5, 6.5, 0.0)


def test_ends_without_layers_keep_what_they_take() -> None:
    model = block_times(STAGES, (0, 2, 3, 0))
    first, *_, last = model.times((1, 2, 1, 1))
    assert (first.forward_ms, first.backward_ms) == (4.0 + 2.0, 5.0 + 4.0)
    assert (last.forward_ms, last.backward_ms) == (8.0 + 1.0, 16.0 + 2.0)
    assert not any(stage.errors() for stage in model.times((1, 2, 1, 1)))


@pytest.mark.parametrize("seed", range(8))
def test_no_split_has_a_shorter_longest_rank(seed: int) -> None:
    rng = random.Random(seed)
    stages = [StageTimes(rng.uniform(1, 9), rng.uniform(9, 30)) for _ in LAYERS]
    model = block_times(stages, (2, 3, 2, 2))
    each = [(s.forward_ms + s.backward_ms) / n for s, n in zip(stages, model.layers, strict=True)]
    works = [work for work, n in zip(each, model.layers, strict=True) for _ in range(n)]

    def longest(split: tuple[int, ...]) -> float:
        ends = list(itertools.accumulate(split))
        return max(sum(works[end - n : end]) for n, end in zip(split, ends, strict=True))

    load = time_load(model, range(4))
    found = min_max_split(9, load)
    assert longest(found) == pytest.approx(min(map(longest, all_splits(9, (0, 1, 1, 0)))))
    assert max(load.of_split(found)) == pytest.approx(1e6 * longest(found))


def test_a_stage_without_layers_is_told() -> None:
    model: BlockTimes = block_times(STAGES, LAYERS)
    with pytest.raises(ValueError, match="the split 3,0,3,1 leaves a stage without layers"):
        model.times((3, 0, 3, 1))


def test_plan_tells_what_each_partition_brings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dag = build_dag(one_f_one_b_order(4, 8))
    parameters = PartParameters(1, (1, 2, 2, 4, 4, 4, 40), 3)
    notes = PipelineMetadata(ranks=4, layers=LAYERS, stages=tuple(STAGES), parameters=parameters)
    path, plan = tmp_path / "bounds.json", tmp_path / "plan.json"
    path.write_text(bounds_file_text(dag, bounds_from_times(dag, STAGES), notes))
    splits = ["default", "balanced", "time", "parameters", "5,1,0,1"]
    words = ["--r-max", "0.5", "--schedules", "1F1B", "ZBVZeroBubble", "--splits", *splits]
    assert main([str(path), "--json", str(plan), *words]) == 0
    cases = json.loads(plan.read_text())["cases"]
    found = {case["split"]: case for case in cases if case["schedule"] == "1F1B"}
    assert found["default"]["layers"] == list(LAYERS)
    # 9, 6, 6, 3, 3, 3 and 24 ms: 24 is the least; 9, 12 and 9 beside it are the most even.
    assert found["time"]["layers"] == [1, 2, 3, 1]
    # 40 is the least; before it 1 + 9 and 8.
    assert found["parameters"]["layers"] == [4, 2, 1, 0]
    assert found["balanced"]["step_ms"] <= min(case["step_ms"] for case in found.values())
    said = " ".join(capsys.readouterr().out.split())
    assert "layers differ: one takes the time of the stage that it was measured in" in said
    assert "a rank has 2 stages, and the layers of the model differ" in said
    assert "split 5,1,0,1: the split 5,1,0,1 leaves a stage without layers" in said
