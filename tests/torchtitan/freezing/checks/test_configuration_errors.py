"""Errors in values of the configuration: a table, and what a row of it cannot show."""

from typing import Any

import pytest

from tests.torchtitan.helpers.job_configs import config, errors

ZERO_BUBBLE = {"parallelism__pipeline_parallel_schedule": "InterleavedZeroBubble"}

# Key, value, and words of the rule.
ERRORS: list[tuple[str, Any, tuple[str, ...]]] = [
    ("parallelism.pipeline_parallel_schedule", "2F2B", ("known: GPipe, 1F1B, Interleaved1F1B",)),
    ("parallelism.pipeline_parallel_microbatch_size", 0, ("it must be 1 or more",)),
    ("freezing.method", "afp", ("known: none, timelyfreeze, apf", "timelyfreeze+apf")),
    ("freezing.last_monitor_step", 61, ("at least 2 above freezing.last_warmup_step (60)",)),
    ("freezing.last_ramp_step", 100, ("above freezing.last_monitor_step (100)",)),
    ("freezing.discard_batches", 20,
     ("it must be below the 20 batches of each half",
      "freezing.last_warmup_step 60 to freezing.last_monitor_step 100")),
    ("freezing.solver_delay_steps", 100, ("below the 100 steps of the ramp",)),
    ("freezing.max_freeze_ratio", 1.5, ("must lie in [0, 1]",)),
    ("freezing.max_freeze_ratio", [0.5, 0.5], ("one for each of the 4 stages",)),
    ("report.device_hour_price", -0.5, ("it must be 0 or more",)),
    ("data.validation_fraction", 1.0, ("it must be 0 or more and below 1",)),
    ("data.validation_fraction", -0.5, ("0 or more",)),
    ("freezing.seed", -1, ("must be 0 or more",)),
    ("freezing.solver_time_limit_s", 100.0, ("below comm.train_timeout_seconds (100)",)),
]  # fmt: skip
# Where another key is changed too, or told.
CLASHES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"parallelism__pipeline_parallel_microbatch_size": 3},
     ("training.local_batch_size is 8",
      "parallelism.pipeline_parallel_microbatch_size (3) must divide")),
    ({"training__steps": 100},
     ("freezing.last_monitor_step is 100", "before training.steps (100)")),
    ({"freezing__monitoring": "mixed", "freezing__discard_batches": 38},
     ("freezing.discard_batches is 38", "leave 3 of the 40 batches of mixed monitoring",
      "freezing.last_warmup_step 60 to freezing.last_monitor_step 100")),
    ({"freezing__solver_delay_steps": 10, "training__steps": 110},
     ("freezing.solver_delay_steps is 10", "at step 110, which must lie before training.steps")),
    ({"freezing__max_freeze_ratio": [0.5] * 4, **ZERO_BUBBLE},
     ("freezing.max_freeze_ratio has 4 values", "one for each of the 8 stages")),
    ({"freezing__max_freeze_ratio": [0.5] * 4,
      "parallelism__module_fqns_per_model_part": [["a"], ["b"], ["c"]],
      "parallelism__pipeline_parallel_degree": 3},
     ("freezing.max_freeze_ratio has 4 values", "one for each of the 3 stages")),
    ({"comm__init_timeout_seconds": 60},
     ("freezing.solver_time_limit_s is 60.0", "below comm.init_timeout_seconds (60)")),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "rule"), ERRORS)
def test_an_error_is_told_with_its_key_its_value_and_the_rule(
    key: str, value: Any, rule: tuple[str, ...]
) -> None:
    (error,) = errors(config(**{key.replace(".", "__"): value}))
    shown = f"has {len(value)} values" if isinstance(value, list) else f"is {value!r}"
    for text in (f"{key} {shown}", *rule):
        assert text in error


@pytest.mark.parametrize(("changes", "texts"), CLASHES)
def test_an_error_names_each_key_that_it_is_about(
    changes: dict[str, Any], texts: tuple[str, ...]
) -> None:
    (error,) = errors(config(**changes))
    for text in texts:
        assert text in error


def test_all_errors_are_told_at_once() -> None:
    found = errors(
        config(
            parallelism__pipeline_parallel_schedule="2F2B",
            freezing__last_monitor_step=0,
            freezing__max_freeze_ratio=[2.0, -1.0],
            freezing__seed=-3,
            optimizer__early_step_in_backward=True,
        )
    )
    keys = [error.split(" is ")[0] for error in found]
    assert keys == [
        "parallelism.pipeline_parallel_schedule",
        "freezing.seed",
        "freezing.max_freeze_ratio",
        "freezing.max_freeze_ratio",
        "freezing.last_monitor_step",
        "optimizer.early_step_in_backward",
    ]
