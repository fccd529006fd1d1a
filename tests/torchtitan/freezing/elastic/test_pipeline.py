"""Which pipeline suits what is frozen, and the configuration that a run goes on with."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.torchtitan.freezing.partition.test_cut import profile, times
from tests.torchtitan.helpers.job_configs import front_config
from timelyfreeze.settings import ElasticSettings
from torchtitan.freezing.checks import check
from torchtitan.freezing.elastic.pipeline import (
    BatchScaling,
    MicrobatchSearch,
    Pipeline,
    RunState,
    candidates,
    first_pipeline,
    pipeline_for,
)
from torchtitan.freezing.memory.estimate import CutMemory
from torchtitan.freezing.values.command_line import ConfigError
from torchtitan.settings import (
    JobConfig,
    cuts_blocks,
    modules_of_split,
    pipeline_order,
    stage_modules,
)

# Upstream's debugmodel, by hand: vocabulary 2,048, width 256, 6 layers.
LAYER = 4 * 256 * 256 + 3 * 256 * 768 + 2 * 256
EMBEDDING, HEAD = 2048 * 256, 2048 * 256 + 256
START = (1, 2, 2, 1)


def elastic(settings: ElasticSettings | None = None, **changes: Any) -> JobConfig:
    return front_config(freezing__elastic=settings or ElasticSettings(enable=True), **changes)


def loads(split: tuple[int, ...], n_frozen: int, frozen_cost: float = 1 / 6) -> list[float]:
    """Parameters of each stage; those of frozen layers and of the embedding count less."""
    sizes = [float(LAYER)] * 6
    sizes[0] += EMBEDDING
    sizes[5] += HEAD
    costs = [s * (frozen_cost if i < n_frozen else 1.0) for i, s in enumerate(sizes)]
    ends = [sum(split[: i + 1]) for i in range(len(split))]
    return [sum(costs[end - n : end]) for n, end in zip(split, ends, strict=True)]


def test_a_run_begins_as_it_is_configured() -> None:
    assert first_pipeline(elastic()) == Pipeline(START)
    for n_frozen in (0, 6):
        assert pipeline_for(elastic(), n_frozen) == Pipeline(START)


def test_it_becomes_shorter_when_no_rank_gets_more_than_at_the_start() -> None:
    most = max(loads(START, 0))
    found = {n: pipeline_for(elastic(), n) for n in range(1, 6)}
    # With 4 frozen, neither two live layers and the head fit on a rank, nor can four ranks have a
    # layer each: a run stays in the pipeline that it has.
    assert [n for n, pipeline in found.items() if pipeline is None] == [4]
    pipelines = {n: pipeline for n, pipeline in found.items() if pipeline is not None}
    for n_frozen, pipeline in pipelines.items():
        assert sum(pipeline.split) == 6
        assert pipeline.n_replicas * len(pipeline.split) == 4
        # All frozen layers are on the first rank.
        assert pipeline.split[0] >= n_frozen
        if len(pipeline.split) == 2:
            assert max(loads(pipeline.split, n_frozen)) <= most
    assert [len(p.split) for p in pipelines.values()] == [4, 4, 4, 2]


def test_what_frozen_layers_cost_decides_when() -> None:
    dear = elastic(ElasticSettings(enable=True, frozen_cost=1.0))
    pipelines = [pipeline_for(dear, n) for n in range(1, 6)]
    assert all(p is None or len(p.split) == 4 for p in pipelines)


def test_it_becomes_no_shorter_than_the_user_says() -> None:
    kept = elastic(ElasticSettings(enable=True, min_ranks=3))
    assert pipeline_for(kept, 5) is None


def test_with_a_single_rank_it_is_data_parallelism_alone() -> None:
    """Frozen layers that cost nothing leave a live one and the head, as the last rank had."""
    free = ElasticSettings(enable=True, frozen_cost=0.0, min_ranks=1)
    found = pipeline_for(elastic(free), 5)
    assert found == Pipeline((6,), 4)
    moved = found.moved(elastic(free))
    check(moved)
    assert moved.parallelism.pipeline_parallel_degree == 1
    assert moved.training.local_batch_size == 2
    assert [str(action) for action in pipeline_order(moved, 6).ranks[0]] == [
        "0F0", "0B0", "0F1", "0B1"]  # fmt: skip
    started = elastic(free, parallelism__pipeline_parallel_degree=1)
    with pytest.raises(ConfigError, match="pipeline_parallel_degree is 1"):
        check(started)


def test_between_attention_and_mlp_there_are_cuts_where_whole_layers_have_none() -> None:
    """ViT-B/16 with a head for ImageNet, on 8 devices; depths 6 and 7 have none either."""
    pytest.importorskip("transformers")
    pictures = {
        "model__name": "vit",
        "model__flavor": "B-16",
        "vision__classes": 1000,
        "training__dataset": "images",
        "parallelism__pipeline_parallel_degree": 8,
    }
    for n_frozen in (8, 10):
        assert pipeline_for(elastic(**pictures), n_frozen) is None
        finer = elastic(ElasticSettings(enable=True, sublayers=True), **pictures)
        found = pipeline_for(finer, n_frozen)
        assert found is not None
        assert found.layers[0] >= n_frozen
        assert sum(found.layers) == 12
        assert len(found.split) * found.n_replicas == 8
        assert cuts_blocks(found.moved(finer))


def by_time(folder: Path, settings: ElasticSettings | None = None, **changes: Any) -> JobConfig:
    """3 ms a layer, a third of it forward; 1 ms of the embedding and 9 ms of the head besides."""
    stages = [times(7.0), times(6.0), times(15.0)]
    file = profile(folder / "bounds.json", *stages, layers=(2, 2, 2))
    return elastic(
        settings or ElasticSettings(enable=True, partition="time"),
        parallelism__partition_profile=str(file),
        **changes,
    )


def cuts_with_room(job_config: JobConfig, n_ranks: int, n_frozen: int) -> list[tuple[int, ...]]:
    """Every cut for so many ranks, each as full as the fullest at the start at most."""
    limit = CutMemory(job_config, 6).of_fullest(START)
    ends = itertools.combinations(range(1, 6), n_ranks - 1)
    cuts = [tuple(b - a for a, b in itertools.pairwise((0, *inner, 6))) for inner in ends]
    shorter = elastic(
        parallelism__pipeline_parallel_degree=n_ranks,
        parallelism__module_fqns_per_model_part=modules_of_split((1,) * n_ranks),
        training__local_batch_size=8 * n_ranks // 4,
    )
    memory = CutMemory(shorter, 6)
    return [cut for cut in cuts if memory.of_fullest(cut, n_frozen) <= limit]


@pytest.mark.parametrize("min_ranks", [1, 2, 4])
@pytest.mark.parametrize("n_frozen", range(1, 6))
def test_by_time_it_is_the_most_even_of_all_cuts_that_have_room(
    tmp_path: Path, n_frozen: int, min_ranks: int
) -> None:
    """With 4 ranks at least, it is SmartPipe's allocation: live layers are cut again (Eq. 11)."""
    settings = ElasticSettings(enable=True, partition="time", min_ranks=min_ranks)
    job_config = by_time(tmp_path, settings)
    costs = [1.0 if i < n_frozen else 3.0 for i in range(6)]
    costs[0] += 1 / 3  # the embedding's forward
    costs[5] += 9.0

    def most(cut: tuple[int, ...]) -> float:
        ends = list(itertools.accumulate(cut))
        return max(sum(costs[end - n : end]) for n, end in zip(cut, ends, strict=True))

    shorter = [n for n in (4, 2, 1) if n >= min_ranks]
    cuts = [c for c in (cuts_with_room(job_config, n, n_frozen) for n in shorter) if c][-1]
    n_replicas = 4 // len(cuts[0])
    found = pipeline_for(job_config, n_frozen)
    assert found is not None
    assert (found.n_replicas, len(found.split)) == (n_replicas, 4 // n_replicas)
    assert found.split in cuts
    assert most(found.split) == pytest.approx(min(map(most, cuts)))


def test_by_time_live_layers_are_cut_anew_as_the_front_grows(tmp_path: Path) -> None:
    """By hand: 3 ms live, 1 ms frozen, 12 ms the last layer with the head, whatever is frozen."""
    stays = ElasticSettings(enable=True, partition="time", min_ranks=4)
    # Of 1.3 1 3 3 3 and 1.3 1 1 1 3 on three ranks, by least sum of squares.
    for n_frozen, cut in {2: (3, 1, 1, 1), 4: (2, 2, 1, 1)}.items():
        found = pipeline_for(by_time(tmp_path, stays), n_frozen)
        assert found == Pipeline(cut)


def test_every_replica_has_a_microbatch_for_each_stage() -> None:
    """Of 4 microbatches two replicas have 2 each, of 2 only one; of 3 there are no halves."""
    for n in (4, 8):
        assert pipeline_for(elastic(training__local_batch_size=n), 5) == Pipeline((5, 1), 2)
    for n in (2, 3):
        assert pipeline_for(elastic(training__local_batch_size=n), 5) is None


def test_the_rest_of_a_configuration_stays() -> None:
    job_config = elastic(training__global_batch_size=16, validation__local_batch_size=8)
    moved = Pipeline((5, 1), 2).moved(job_config)
    check(moved)
    parallelism = moved.parallelism
    assert parallelism.pipeline_parallel_degree == 2
    assert parallelism.data_parallel_shard_degree == -1
    assert stage_modules(moved, 6) == [
        ["tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3", "layers.4"],
        ["layers.5", "norm", "output"],
    ]
    assert (moved.training.local_batch_size, moved.training.global_batch_size) == (4, 16)
    assert moved.validation.local_batch_size == 4
    assert parallelism.pipeline_parallel_microbatch_size == 1
    assert first_pipeline(job_config) == Pipeline(START)


def test_given_replicas_are_multiplied() -> None:
    job_config = elastic(
        parallelism__data_parallel_shard_degree=2, parallelism__data_parallel_replicate_degree=3
    )
    parallelism = Pipeline((5, 1), 2).moved(job_config).parallelism
    assert parallelism.data_parallel_shard_degree == 4
    assert parallelism.data_parallel_replicate_degree == 3


@pytest.mark.parametrize(("rows", "given", "n_validated"), [(8, -1, -1), (16, 16, 6)])
def test_in_an_emulation_replicas_take_turns(rows: int, given: int, n_validated: int) -> None:
    """There is one process: half the batch, twice as often."""
    job_config = elastic(
        emulation__enable=True,
        training__global_batch_size=given,
        validation__steps=3 if n_validated > 0 else -1,
    )
    moved = Pipeline((5, 1), 2).moved(job_config)
    check(moved)
    assert (moved.training.local_batch_size, moved.training.global_batch_size) == (4, rows)
    assert moved.validation.steps == n_validated
    assert moved.parallelism.data_parallel_shard_degree == -1


PAPER = ElasticSettings(enable=True, global_batch="paper")


@pytest.mark.parametrize(("given", "rows"), [(-1, -1), (8, 16), (16, 32)])
def test_as_in_the_paper_each_replica_keeps_its_rows(given: int, rows: int) -> None:
    """Steps have twice the rows, so 900 steps that are left are 450; the learning rate stays."""
    job_config = elastic(PAPER, training__global_batch_size=given)
    assert first_pipeline(job_config) == Pipeline(START, last_step=1000)
    found = pipeline_for(job_config, 5)
    assert found is not None
    found = found.ending(job_config, RunState(5, step=100, n_batches=100))
    assert found == Pipeline((5, 1), 2, last_step=550)
    moved = found.moved(job_config)
    check(moved)
    training = moved.training
    assert (training.local_batch_size, training.global_batch_size) == (8, rows)
    assert (training.steps, moved.lr_scheduler.total_steps) == (550, 1000)
    assert found.scaling(job_config) == BatchScaling(2, 1.0)
    # Unfrozen again at step 300, with the rows of 500 steps.
    back = first_pipeline(job_config).ending(job_config, RunState(0, step=300, n_batches=500))
    assert back == Pipeline(START, last_step=800)


def test_as_in_the_paper_replicas_need_not_share_microbatches() -> None:
    """Of 3 or 5 there are no halves; in the pipeline of the start it is for the user to have 4."""
    for n in (3, 5, 8):
        found = pipeline_for(elastic(PAPER, training__local_batch_size=n), 5)
        assert found == Pipeline((5, 1), 2)


def test_in_an_emulation_a_step_has_a_batch_of_each_replica() -> None:
    job_config = elastic(PAPER, emulation__enable=True, training__global_batch_size=-1)
    moved = Pipeline((5, 1), 2, last_step=550).moved(job_config)
    check(moved)
    assert (moved.training.local_batch_size, moved.training.global_batch_size) == (8, 16)


@pytest.mark.parametrize(
    ("pipeline", "words"),
    [
        (
            Pipeline((4, 2), microbatch=3),
            "in a pipeline of 2 ranks with 4,2 layers, with microbatches of 3",
        ),
        (Pipeline((4, 2), last_step=9), "in a pipeline of 2 ranks with 4,2 layers, up to step 9"),
        (Pipeline((4, 2)), "in a pipeline of 2 ranks with 4,2 layers"),
        (Pipeline((7, 5), sublayers=True), "in a pipeline of 2 ranks with 3.5,2.5 layers"),
        (Pipeline((6,), 4), "with the whole model on each rank, 4 of them side by side"),
        (Pipeline((4, 2), 2), "in a pipeline of 2 ranks with 4,2 layers, 2 of them side by side"),
    ],
)
def test_a_pipeline_in_words(pipeline: Pipeline, words: str) -> None:
    assert str(pipeline) == words


def search(**changes: Any) -> MicrobatchSearch:
    return MicrobatchSearch(elastic(training__local_batch_size=24, **changes), lambda one: one)


def tried(
    searching: MicrobatchSearch, pipeline: Pipeline, table: dict[int, list[float]], rows: int
) -> list[int]:
    """Microbatches of each step that a run with such times makes until nothing is tried any more.

    Of each number of microbatches the steps take as long as the table says, one after another.
    """
    seen: list[int] = []
    pipeline = searching.begin(pipeline)
    while True:
        n = rows // (pipeline.microbatch or 1)
        if seen.count(n) == len(table[n]):
            return [*seen, n]
        seconds = table[n][seen.count(n)]
        seen.append(n)
        pipeline = searching.after_step(pipeline, seconds)


@pytest.mark.parametrize(
    ("n_ranks", "rows", "expected"),
    [
        (4, 8, [4, 8]),
        (2, 4, [2, 4]),
        (4, 24, [4, 6, 12, 24]),  # of 4 6 8 12 24
        (2, 7, [7]),
        (4, 3, []),
        (8, 10, [10]),
        (4, 120, [4, 8, 12, 24]),  # of 4 5 6 8 10 12 15 20 24, every third but one
    ],
)
def test_candidates_divide_the_rows(n_ranks: int, rows: int, expected: list[int]) -> None:
    assert candidates(n_ranks, rows) == expected


@pytest.mark.parametrize("best", [4, 6, 12, 24])
def test_the_one_with_the_least_median_stays(best: int) -> None:
    """First steps, the slowest of three and the fastest of them decide nothing."""
    table = {n: [99.0, 0.1, 5.0 + n, 90.0] for n in (4, 6, 12, 24)}
    table[best] = [99.0, 4.0, 4.0, 99.0]
    seen = tried(search(), Pipeline(START), table, rows=24)
    assert seen == [n for n in (4, 6, 12, 24) for _ in range(4)] + [best]


def test_it_is_searched_once_for_each_length_of_a_pipeline() -> None:
    searching = search()
    table = {n: [1.0, 1.0 / n, 1.0 / n, 1.0 / n] for n in (4, 6, 12, 24)}
    assert tried(searching, Pipeline(START), table, rows=24)[-1] == 24
    again = searching.begin(Pipeline((3, 1, 1, 1)))
    assert again == Pipeline((3, 1, 1, 1))  # 24 microbatches: those of the start
    assert searching.after_step(again, 1.0) == again
    # Two replicas of 2 ranks share the rows: of 2 3 4 6 12 microbatches.
    table = {n: [1.0, 1.0 * n, 1.0 * n, 1.0 * n] for n in (2, 3, 6, 12)}
    seen = tried(searching, Pipeline((5, 1), 2), table, rows=12)
    assert seen[-1] == 2
    assert searching.begin(Pipeline((4, 2), 2)).microbatch == 6


def test_a_front_that_grows_meanwhile_begins_the_search_anew() -> None:
    searching = search()
    first = searching.begin(Pipeline(START))
    for _ in range(4):
        first = searching.after_step(first, 0.1)
    assert first.microbatch == 4
    assert searching.begin(Pipeline((3, 1, 1, 1))).microbatch == 6


def test_the_time_of_the_slowest_rank_counts() -> None:
    """On this rank 4 microbatches are fastest, on another one 8."""
    elsewhere = iter([9.0, 5.0])
    job_config = elastic()
    searching = MicrobatchSearch(job_config, lambda one: max(one, next(elsewhere)))
    table = {4: [1.0, 1.0, 1.0, 1.0], 8: [2.0, 2.0, 2.0, 2.0]}
    assert tried(searching, Pipeline(START), table, rows=8)[-1] == 8


def test_where_nothing_divides_the_rows_they_stay() -> None:
    searching = MicrobatchSearch(elastic(training__local_batch_size=3), lambda one: one)
    assert searching.begin(Pipeline(START)) == Pipeline(START)
    for _ in range(5):
        assert searching.after_step(Pipeline(START), 1.0) == Pipeline(START)


def test_microbatches_that_are_tried_have_other_rows() -> None:
    job_config = elastic()
    moved = replace(Pipeline((5, 1), 2), microbatch=2).moved(job_config)
    assert moved.parallelism.pipeline_parallel_microbatch_size == 2
    assert moved.training.local_batch_size == 4
