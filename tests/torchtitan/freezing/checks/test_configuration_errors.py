"""Errors in values of the configuration, as tests/assets/golden has them, and all at once."""

from typing import Any

import pytest

from tests.tools.golden import assert_golden, assert_only
from tests.torchtitan.helpers.job_configs import config, errors
from torchtitan.freezing.checks import requirements
from torchtitan.settings import with_values

FILE = "configuration_errors.txt"
PP = "parallelism.pipeline_parallel_"
DEGREES = "parallelism.data_parallel_"
ZERO_BUBBLE = {f"{PP}schedule": "InterleavedZeroBubble"}
ALPACA = {"training.dataset": "alpaca", "freezing.method": "none"}
EXAMPLES = {"training.dataset": "alpaca", "freezing.method": "fixed"}
# Training and validation on the same examples, a tenth held out.
HELD_OUT = {
    **ALPACA,
    "training.dataset_path": "some/examples",
    "training.seq_len": 128,
    "training.local_batch_size": 16,
    f"{PP}degree": 2,
    f"{PP}microbatch_size": 2,
    "validation.enable": True,
    "validation.dataset": "alpaca",
    "validation.dataset_path": "some/examples",
    "validation.seq_len": 128,
    "validation.local_batch_size": 8,
    "data.validation_fraction": 0.1,
}
LORA = {"freezing.method": "lora", "model.flavor": "debugmodel"}
ADAPTERS_FIRST = {**LORA, "lora.until": 48}
# What all of a group have in common, and what one has besides; no rule of a type alone.
CHANGES: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({}, [
        {f"{PP}schedule": "2F2B"},
        {f"{PP}microbatch_size": 0},
        {f"{PP}microbatch_size": 3},
        {"freezing.method": "afp"},
        {"freezing.last_monitor_step": 61},
        {"training.steps": 100},
        {"freezing.last_ramp_step": 100},
        {"freezing.discard_batches": 20},
        {"freezing.monitoring": "mixed", "freezing.discard_batches": 38},
        {"freezing.solver_delay_steps": 100},
        {"freezing.solver_delay_steps": 10, "training.steps": 110},
        {"freezing.solver_time_limit_s": 100.0},
        {"comm.init_timeout_seconds": 60},
        {"freezing.max_freeze_ratio": 1.5},
        {"freezing.max_freeze_ratio": [0.5, 0.5]},
        {"freezing.max_freeze_ratio": [0.5] * 4, **ZERO_BUBBLE},
        {"freezing.max_freeze_ratio": [0.5] * 4, f"{PP}degree": 3,
         "parallelism.module_fqns_per_model_part": [["a"], ["b"], ["c"]]},
        {"freezing.method": "timelyfreeze+apf", "freezing.last_monitor_step": 60},
        {"freezing.method": "timelyfreeze+apf", "freezing.last_monitor_step": 60,
         "freezing.last_ramp_step": 60},
        {"freezing.method": "fixed", "freezing.last_warmup_step": 1000},
        {"freezing.method": "fixed", "freezing.last_warmup_step": -1},
        {"freezing.method": "fixed", "freezing.fixed.names": ["embed", "embeddings"]},
        {"freezing.method": "timelyfreeze+fixed", "freezing.fixed.names": ["embeddings"]},
        {"freezing.method": "fixed", "freezing.fixed.names": ["*_norm"], "compile.enable": True},
        {"training.global_batch_size": 12},
        {"training.seq_len": 33},
        {"parallelism.tensor_parallel_degree": 3},
        {"training.dataset": "nonsense"},
        {"training.dataset": "auto"},
        {"optimizer.name": "Lion"},
        {"model.name": "llama3", "model.flavor": "Llama-9"},
        {"model.name": "qwen3", "model.flavor": "0.6B"},
        {"model.converters": ["x"]},
        {"checkpoint.exclude_from_loading": ["x"]},
        {"lr_scheduler.total_steps": 7},
        {"training.local_batch_size": 2},
        {"training.local_batch_size": 2**20},
    ]),
    ({"model.flavor": "8M"}, [
        {f"{PP}degree": 16},
        {f"{PP}layers_per_stage": 2},
        {f"{PP}layers_per_stage": 1},
        {f"{PP}schedule": "ZBVZeroBubble", f"{PP}layers_per_stage": 1},
        {f"{PP}schedule": "Interleaved1F1B", f"{PP}layers_per_stage": 3},
    ]),
    ({"freezing.method": "none"}, [
        {"WORLD_SIZE": 4, f"{PP}degree": 3},
        {"WORLD_SIZE": 2},
        {"WORLD_SIZE": 4, f"{PP}degree": 2, f"{DEGREES}shard_degree": 4},
        {"WORLD_SIZE": 4, f"{PP}degree": 2, f"{DEGREES}replicate_degree": 2},
        {f"{PP}degree": 2, f"{DEGREES}replicate_degree": 2, f"{DEGREES}shard_degree": 1},
    ]),
    ({"freezing.seed": -1, "freezing.score_memory": "disk"}, [
        {"freezing.method": name, "freezing.apf.threshold": 2.0, "freezing.apf.check_interval": 0}
        for name in ("apf", "timelyfreeze+apf")
    ]),
    (EXAMPLES, [
        {"freezing.elastic.enable": True, "freezing.elastic.partition": "time"},
        {"freezing.elastic.enable": True, "freezing.elastic.join_limit_s": 60.0,
         "freezing.solver_time_limit_s": 30.0, "comm.init_timeout_seconds": 60},
        {"freezing.packing.mode": "performance", "freezing.packing.max_global_batch": 7},
        {"freezing.cache.enable": True, "freezing.cache.memory_gib": 0.0},
        {"freezing.cache.enable": True, "freezing.cache.disk_gib": 1.0,
         "freezing.cache.folder": ""},
    ]),
    ({}, [
        {"parallelism.partition": "time"},
        {"parallelism.partition": "memory", f"{PP}degree": 1},
    ]),
    (ALPACA, [
        {"data.paths": ["a", "b"], "training.dataset_path": "c"},
        {"training.dataset_path": ""},
    ]),
    (HELD_OUT, [
        {"validation.dataset_path": "other/examples"},
        {"validation.dataset": "c4_test", "validation.dataset_path": None},
        {"validation.seq_len": 2048},
        {"validation.local_batch_size": 12},
        {"validation.local_batch_size": 12, "validation.seq_len": 999},
    ]),
    (LORA, [
        {"lora.until": 48},
        {"lora.targets": ["wq", "query"]},
        {"lora.targets": ["layers.0.attention.wq"]},
        {"lora.targets": ["layers.1.attention.wq", "output"]},
        {"freezing.seed": -1},
    ]),
    (ADAPTERS_FIRST, [
        {"lora.until": 900, "freezing.method": "timelyfreeze"},
        {"lora.targets": ["query"], "freezing.method": "none"},
    ]),
]  # fmt: skip


CASES = {
    ", ".join(f"{key} = {value!r}" for key, value in changes.items()): {**common, **changes}
    for common, group in CHANGES
    for changes in group
}


@pytest.mark.parametrize("name", CASES)
def test_an_error_is_told_with_its_key_its_value_and_the_rule(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda package: object())
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    changes = {**CASES[name]}
    if n_processes := changes.pop("WORLD_SIZE", None):
        monkeypatch.setenv("WORLD_SIZE", str(n_processes))
    assert_golden(
        FILE, name, "".join(f"{error}\n" for error in errors(with_values(config(), changes)))
    )


def test_every_error_that_is_expected_is_made() -> None:
    assert_only(FILE, CASES)


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
