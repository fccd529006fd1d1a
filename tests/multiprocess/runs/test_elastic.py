"""A run that moves to other pipelines as its front freezes equals one that stays where it is.

The same rows come in the same steps, in float32, and so do weights, moments and what was frozen.
Runs that stay where they are, and one that is cut again, are emulated.
"""

import itertools
import json
import re

import pytest
import torch
from elastic_scenarios import (
    N_STEPS,
    losses_of_steps,
    per_step,
    rows_folder,
    rows_of_steps,
    scenario,
)
from launcher import EMULATED, merged, run_scenarios
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from timelyfreeze.plots.drawing import draw_run
from timelyfreeze.records.summary import read_summary
from timelyfreeze.records.tables import FRONT, LOSSES, MOVES, STEPS
from timelyfreeze.schedule import build_dag, gpipe_order
from timelyfreeze.whatif.bounds_file import PipelineMetadata, bounds_file_text
from timelyfreeze.whatif.times import StageTimes, bounds_from_times

folder = rows_folder
ALONE = {"freezing__elastic.min_ranks": 1, "freezing__elastic.frozen_cost": 0.05}


def written_profile(path):
    """6 ms a layer, a third of it forward, and nothing else."""
    stages = [StageTimes(2 * n, 4 * n, 2 * n, 2 * n, 2 * n, 0.0) for n in (3, 4, 3)]
    dag = build_dag(gpipe_order(3, 4))
    notes = PipelineMetadata(layers=(3, 4, 3))
    path.write_text(bounds_file_text(dag, bounds_from_times(dag, stages), notes))
    return path


@pytest.fixture(scope="module")
def runs(folder):
    emulated = [
        scenario(folder, "stays", is_elastic=False, **EMULATED),
        scenario(
            folder,
            "re-split",
            is_elastic=True,
            parallelism__partition_profile=written_profile(folder / "bounds.json"),
            **{"freezing__elastic.partition": "time", "freezing__elastic.min_ranks": 4},
            **EMULATED,
        ),
    ]
    scenarios = [
        scenario(
            folder,
            "moves",
            is_elastic=True,
            save_at=[7, 9],
            metrics__enable_tensorboard=None,
            **{"freezing__elastic.sublayers": None},
            **ALONE,
        ),
    ]
    seen = run_scenarios(folder, 1, emulated, script="elastic_run.py")
    seen |= run_scenarios(folder, 4, scenarios, script="elastic_run.py")
    resumed = [
        # In the pipeline of the start, from a checkpoint of a shorter one, and the other way round.
        scenario(folder, "resumed", is_elastic=True, resumes="moves/checkpoint/step-9", **ALONE),
    ]
    emulated = [
        scenario(
            folder, "stays there", is_elastic=False, resumes="moves/checkpoint/step-7", **EMULATED
        ),
    ]
    seen |= run_scenarios(folder / "later", 1, emulated, script="elastic_run.py")
    return seen | run_scenarios(folder / "later", 4, resumed, script="elastic_run.py")


@pytest.fixture(scope="module")
def late(folder):
    """A run whose ranks 3 and 0 are late for its moves."""
    # Of three moves; rank 3 writes the run's folder. In processes of its own: torch keeps the names
    # of groups for equal meshes, which a run that moves less often would number otherwise.
    limit = {**ALONE, "freezing__elastic.join_limit_s": 5.0}
    late = scenario(folder, "late", is_elastic=True, late={4: 3, 6: 0}, **limit)
    return run_scenarios(folder / "other", 4, [late], script="elastic_run.py")["late"]


@pytest.fixture(scope="module")
def papers(folder):
    """Runs whose steps grow with the replicas, as PipeTransformer's do."""
    paper = {"freezing__elastic.global_batch": "paper", "lr_scheduler__decay_ratio": 0.0}
    place = folder / "papers"
    grows = [scenario(folder, "paper", is_elastic=True, save_at=[6, 7], **paper)]
    seen = run_scenarios(place, 4, grows, script="elastic_run.py")
    saved = "papers/paper/checkpoint/step-7"
    again = [scenario(folder, "paper again", is_elastic=True, resumes=saved, **paper)]
    seen |= run_scenarios(place / "later", 4, again, script="elastic_run.py")
    emulated = [
        # By hand, with twice the rows in two accumulations.
        scenario(
            folder,
            "accumulates",
            is_elastic=False,
            resumes="papers/paper/checkpoint/step-6",
            training__steps=8,
            training__global_batch_size=16,
            lr_scheduler__decay_ratio=0.0,
            **EMULATED,
        ),
    ]
    return seen | run_scenarios(place / "later", 1, emulated, script="elastic_run.py")


def test_the_pipeline_becomes_shorter_and_replicas_take_the_free_ranks(runs):
    pipelines = [
        (ranks, replicas, rows) for _, ranks, replicas, rows in runs["moves"][0]["pipelines"]
    ]
    assert pipelines[0] == (4, 1, 8)
    # Cut again before it became shorter; in the end every rank has the whole model.
    assert [ranks for ranks, _, _ in pipelines] == [4, 4, 2, 1]
    assert pipelines[2:] == [(2, 2, 4), (1, 4, 2)]


def test_it_is_cut_between_attention_and_mlp(run_folder):
    """A half at a stage's end is one of a block, so that 0.5 layers are an MLP with the head."""
    assert [move.split for move in MOVES.read(run_folder)] == ["5.5 2 2 0.5", "9.5 0.5", "10"]


def test_with_all_ranks_kept_the_live_layers_are_cut_anew_by_time(runs):
    """SmartPipe's allocation (Eq. 11), by hand: 2 ms of a frozen layer, 6 ms of a live one."""
    first, *others = runs["re-split"][0]["splits"]
    assert first == runs["stays"][0]["splits"][0]
    found = []
    for n_frozen, split in zip((4, 8, 9), others, strict=True):
        layers = iter([2] * n_frozen + [6] * (10 - n_frozen))
        found.append(sorted(sum(itertools.islice(layers, n)) for n in split))
    assert found == [[8, 12, 12, 12], [6, 6, 8, 8], [6, 6, 6, 6]]
    assert [shape for _, *shape in runs["re-split"][0]["pipelines"]] == [[4, 1, 8]] * 4


@pytest.mark.parametrize("name", ["moves", "re-split", "resumed", "stays there"])
def test_no_row_is_lost_or_comes_twice(runs, name):
    expected, found = rows_of_steps(runs["stays"]), rows_of_steps(runs[name])
    assert found == {step: expected[step] for step in found}
    assert max(found) == N_STEPS


@pytest.mark.parametrize("name", ["moves", "re-split", "resumed", "stays there"])
def test_losses_and_weights_are_those_of_a_run_that_stays(runs, name):
    expected, found = losses_of_steps(runs["stays"]), losses_of_steps(runs[name])
    assert found == pytest.approx({step: expected[step] for step in found}, rel=1e-6)
    for key in ("weights", "moments"):
        want, have = merged(runs["stays"], key), merged(runs[name], key)
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["moves", "resumed", "stays there"])
def test_what_is_frozen_is_that_of_a_run_that_stays(runs, name):
    expected = {step: set(found) for step, found in per_step(runs["stays"], "frozen").items()}
    found = {step: set(found) for step, found in per_step(runs[name], "frozen").items()}
    assert found == {step: expected[step] for step in found}


@pytest.mark.long
def test_as_in_the_paper_rows_of_a_step_grow_and_come_in_order(runs, papers):
    """Six steps, and the rows of the other four in two: none is lost or comes twice."""
    stays, found = rows_of_steps(runs["stays"]), rows_of_steps(papers["paper"])
    assert papers["paper"][0]["pipelines"][-1][1:] == (2, 2, 8)
    expected = {step: stays[step] for step in range(1, 7)}
    expected |= {7: stays[7] | stays[8], 8: stays[9] | stays[10]}
    assert found == expected
    assert {len(rows) for rank in papers["paper"] for _, rows in rank["rows"]} == {8}
    assert [len(found[step]) for step in (6, 7, 8)] == [8, 16, 16]  # so no row is in two replicas
    assert rows_of_steps(papers["paper again"]) == {8: expected[8]}


@pytest.mark.long
@pytest.mark.parametrize("name", ["paper again", "accumulates"])
def test_a_larger_step_is_one_of_a_run_that_accumulates_as_many_rows(papers, name):
    found, expected = papers["paper"], papers[name]
    assert {rank["step"] for rank in (*found, *expected)} == {8}
    losses, rates = losses_of_steps(found), dict(found[0]["rates"])
    assert losses_of_steps(expected) == pytest.approx(
        {step: losses[step] for step in losses_of_steps(expected)}, rel=1e-6
    )
    assert dict(expected[0]["rates"]) == {step: rates[step] for step in dict(expected[0]["rates"])}
    for key in ("weights", "moments"):
        have, want = merged(found, key), merged(expected, key)
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["moves", "resumed"])
def test_the_average_freeze_ratio_counts_every_step(runs, name):
    def ratio(ranks):
        sums = [sum(rank["freeze_ratio_sums"][i] for rank in ranks) for i in (0, 1)]
        return sums[0] / sums[1]

    assert ratio(runs[name]) == pytest.approx(ratio(runs["stays"]), rel=1e-9)


@pytest.mark.long
def test_a_move_that_a_rank_is_late_for_is_given_up_and_the_next_is_not(runs, late, folder):
    unhindered = runs["moves"][0]["pipelines"]
    assert [shape for _, *shape in late[0]["pipelines"]] == [
        shape for _, *shape in (unhindered[0], unhindered[-1])
    ]
    expected, found = losses_of_steps(runs["stays"]), losses_of_steps(late)
    assert found == pytest.approx(expected, rel=1e-6)
    assert rows_of_steps(late) == rows_of_steps(runs["stays"])
    for key in ("weights", "moments"):
        want, have = merged(runs["stays"], key), merged(late, key)
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-7)
    in_place = range(1, 9)  # the third check, after step 8, moves
    assert [found[step] for step in in_place] == [expected[step] for step in in_place]
    log = (folder / "other/log.txt").read_text()
    for rank in (3, 0):
        assert re.search(
            rf"does not go on in a pipeline of \d ranks .*, but as before: rank {rank} on host "
            r"\S+ not ready within 5 s \(freezing.elastic.join_limit_s\)",
            log,
        )
    assert len(log.split("but as before:")) == 3


@pytest.fixture(scope="module")
def run_folder(runs, folder):
    """What the run that moves has written."""
    (only,) = (folder / "moves" / "tb").iterdir()
    return only


def test_a_run_that_moves_has_one_folder(run_folder):
    every_step = list(range(1, N_STEPS + 1))
    for table in (LOSSES, STEPS, FRONT):
        rows = table.read(run_folder)
        assert [row.step for row in rows] == every_step, table.name
    seconds = [row.seconds for row in LOSSES.read(run_folder)]
    assert seconds == sorted(seconds)
    assert len(list(run_folder.glob("events.out.tfevents.*"))) == 1


def test_its_losses_are_those_of_a_run_that_stays(runs, run_folder):
    expected = losses_of_steps(runs["stays"])
    found = {row.step: row.train_loss for row in LOSSES.read(run_folder)}
    assert found == pytest.approx(expected, rel=1e-6)


def test_its_p_eff_is_that_of_a_run_that_stays(folder, run_folder):
    """Energies of frozen tensors cannot be measured again after a move."""
    (other,) = (folder / "stays" / "tb").iterdir()
    expected, found = ([row.p_eff for row in STEPS.read(each)] for each in (other, run_folder))
    assert found == pytest.approx(expected, rel=1e-4)
    assert found[-1] < 0.9 < found[0]
    assert read_summary(run_folder).p_eff == pytest.approx(read_summary(other).p_eff, rel=1e-4)


def test_its_moves_are_listed(runs, run_folder):
    moves, built = MOVES.read(run_folder), runs["moves"][0]["pipelines"]
    assert [(move.ranks, move.replicas) for move in moves] == [
        (ranks, replicas) for _, ranks, replicas, _ in built[1:]
    ]
    # After the checks of steps 4, 6 and 8.
    assert [(move.step, move.frozen_layers) for move in moves] == [(5, 4), (7, 8), (9, 9)]
    assert all(len(move.split.split()) == move.ranks for move in moves)
    assert all(sum(map(float, move.split.split())) == 10 for move in moves)
    report = (run_folder / "report.txt").read_text()
    page = (run_folder / "report.md").read_text()
    for move in moves:
        assert f"\n  step {move.step} " in report
        assert f"| {move.step} | {move.frozen_layers} | {move.ranks} | {move.replicas} |" in page


def test_its_summary_covers_every_step(runs, run_folder):
    summary, steps = read_summary(run_folder), STEPS.read(run_folder)
    moves = MOVES.read(run_folder)
    assert (summary.steps_done, summary.ended_early) == (N_STEPS, None)
    assert (summary.n_devices, summary.ranks_per_replica) == (4, 4)
    assert summary.seconds == pytest.approx(sum(row.step_ms for row in steps) / 1e3, rel=1e-5)
    assert summary.moves == len(moves)
    assert summary.moves_seconds == pytest.approx(sum(move.seconds for move in moves), rel=1e-5)
    sums = [sum(rank["freeze_ratio_sums"][i] for rank in runs["moves"]) for i in (0, 1)]
    assert summary.average_freeze_ratio == pytest.approx(sums[0] / sums[1])
    settings = json.loads((run_folder / "settings.json").read_text())
    assert settings["parallelism"]["pipeline_parallel_degree"] == 4


def test_what_is_of_one_pipeline_is_numbered(run_folder):
    n_moves = len(MOVES.read(run_folder))
    for number in range(1, n_moves + 1):
        for name in ("schedule", "responses"):
            assert (run_folder / f"{name}_{number}.csv").exists()
    ranks = [len((run_folder / name).read_text().splitlines()) for name in (
        "schedule_1.csv", "schedule.csv")]  # fmt: skip
    assert ranks == [4, 1]


def test_its_curves_in_tensorboard_are_whole(run_folder):
    events = EventAccumulator(str(run_folder))
    events.Reload()
    assert [e.step for e in events.Scalars("loss_metrics/global_avg_loss")] == [
        *range(1, N_STEPS + 1)
    ]
    replicas = [event.value for event in events.Scalars("freezing/elastic/replicas")]
    assert (replicas[0], replicas[-1]) == (1.0, 4.0)
    assert [e.value for e in events.Scalars("freezing/elastic/ranks")] == [4 / n for n in replicas]


def test_its_folder_can_be_drawn(run_folder):
    drawn = draw_run(run_folder)
    assert drawn.broken == {}
    assert "front.png" in {file.name for file in drawn.files}


def test_nothing_of_a_former_pipeline_is_kept(runs):
    assert [rank["n_left_over"] for rank in runs["moves"]] == [0, 0, 0, 0]
