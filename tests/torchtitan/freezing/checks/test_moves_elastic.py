"""Errors in an elastic pipeline: each names its key, before anything starts."""

from typing import Any

import pytest

from tests.torchtitan.freezing.elastic.test_pipeline import elastic
from tests.torchtitan.helpers.job_configs import errors
from timelyfreeze.settings import CacheSettings, ElasticSettings
from torchtitan.freezing.checks import check


@pytest.mark.parametrize(
    "method", ["fixed", "autofreeze", "pipetransformer", "egeria", "timelyfreeze+autofreeze"]
)
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_policies_are_taken_with_a_plan_and_without(method: str, schedule: str) -> None:
    check(elastic(freezing__method=method, parallelism__pipeline_parallel_schedule=schedule))


def test_without_freezing_nothing_is_wrong() -> None:
    check(elastic(freezing__method="none", training__dataset="c4"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"freezing__method": "timelyfreeze"},
            "freezing.method is 'timelyfreeze', which has no policy that freezes a front; it must "
            "be a policy, or 'timelyfreeze+' and one",
        ),
        (
            {
                "freezing__method": "timelyfreeze+autofreeze",
                "freezing__max_freeze_ratio": [0.8, 0.7],
            },
            "freezing.max_freeze_ratio is [0.8, 0.7], one for each stage of one pipeline; it must "
            "be one value",
        ),
        (
            {"parallelism__pipeline_parallel_schedule": "Interleaved1F1B"},
            "the schedule is 'Interleaved1F1B'; parallelism.pipeline_parallel_schedule must be one "
            "with a stage on each rank: GPipe, 1F1B",
        ),
        (
            {"parallelism__tensor_parallel_degree": 2},
            "parallelism.tensor_parallel_degree is 2; it must be 1",
        ),
        (
            {"training__dataset": "c4"},
            "training.dataset is 'c4', whose rows cannot be dealt to more replicas; it must be one "
            "of auto, messages, sharegpt, prompt_completion, alpaca",
        ),
    ],
)
def test_what_does_not_go_together(changes: dict[str, Any], message: str) -> None:
    lines = errors(elastic(**changes))
    assert f"freezing.elastic.enable is true, and {message}" in lines


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"freezing__skip_input_grads": "off"},
            "a frozen front keeps its activations with freezing.first_stage 'all_or_nothing' and "
            'skip_input_grads \'off\'; they must be "all_or_nothing" and "use"',
        ),
        (
            {"compile__enable": True},
            'compile.components has "model": compiled blocks keep their activations, frozen or '
            'not; set compile.enable = false or components = ["loss"]',
        ),
    ],
)
def test_by_time_a_frozen_front_frees_memory(changes: dict[str, Any], message: str) -> None:
    by_time = ElasticSettings(enable=True, partition="time")
    profile = {"parallelism__partition_profile": "bounds.json"}
    check(elastic(by_time, **profile))
    lines = errors(elastic(by_time, **profile, **changes))
    assert f"freezing.elastic.partition is 'time', and {message}" in lines


def test_by_time_it_needs_a_profile() -> None:
    by_time = ElasticSettings(enable=True, partition="time")
    assert errors(elastic(by_time)) == [
        "freezing.elastic.partition is 'time', which needs parallelism.partition_profile: a "
        "bounds.json that `timelyfreeze profile` or a training run has written"
    ]
    check(elastic(by_time, freezing__method="none"))
    check(elastic(ElasticSettings(partition="time")))


def test_it_goes_together_with_an_emulation() -> None:
    check(elastic(emulation__enable=True))


def test_in_an_emulation_and_with_a_plan_no_microbatches_are_tried() -> None:
    searching = ElasticSettings(enable=True, search_microbatches=True)
    check(elastic(searching))
    job_config = elastic(searching)
    job_config.freezing.method = "timelyfreeze+pipetransformer"
    assert any(
        "which would plan anew for each number that is tried; it must be a policy" in line
        for line in errors(job_config)
    )
    (line,) = errors(elastic(searching, emulation__enable=True))
    assert line == (
        "freezing.elastic.search_microbatches is true, and emulation.enable is true: times by the "
        "virtual clock are known too late; switch one of them off"
    )


def test_it_goes_together_with_the_cache() -> None:
    job_config = elastic()
    job_config.freezing.cache = CacheSettings(enable=True)
    check(job_config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"frozen_cost": -0.1}, "freezing.elastic.frozen_cost is -0.1; it must be in [0, 1]"),
        ({"frozen_cost": 1.1}, "freezing.elastic.frozen_cost is 1.1; it must be in [0, 1]"),
        (
            {"partition": "memory"},
            "freezing.elastic.partition is 'memory'; known: parameters, time",
        ),
        (
            {"global_batch": "linear"},
            "freezing.elastic.global_batch is 'linear'; known: constant, paper",
        ),
        ({"min_ranks": 1}, "freezing.elastic.min_ranks is 1; it must be 2 or more"),
        (
            {"join_limit_s": 0.0},
            "freezing.elastic.join_limit_s is 0.0; it must be above 0 and below "
            "comm.init_timeout_seconds (300), after which ranks fail that wait for another",
        ),
    ],
)
def test_numbers_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    assert errors(elastic(ElasticSettings(enable=True, **settings))) == [message]


def test_a_move_is_given_up_before_ranks_fail_that_wait() -> None:
    job_config = elastic(ElasticSettings(enable=True, join_limit_s=60.0))
    check(job_config)
    job_config.comm.init_timeout_seconds = 60
    (line,) = errors(job_config)
    assert line.startswith(
        "freezing.elastic.join_limit_s is 60.0; it must be above 0 and below "
        "comm.init_timeout_seconds (60)"
    )
