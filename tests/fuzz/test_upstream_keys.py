"""Every number of upstream's own sections with -1, 0, 1, a huge value and infinity."""

import math
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from operator import attrgetter
from pathlib import Path

import pytest
import torch.distributed as dist
from torchtitan.config import JobConfig as TitanJobConfig

from tests.fuzz.mangling import message_of
from tests.torchtitan.helpers.job_configs import config
from torchtitan.freezing.checks import ConfigError, check
from torchtitan.freezing.launch import launch

HUGE, INF = 2**63, math.inf
WHOLE, REAL = (-1, 0, 1, HUGE), (-1, 0, 0.5, 1, HUGE, INF)
# Which of these each key may have, from what upstream and torch do with it; in all others it may
# be 1 alone. A huge number of steps is one that nobody lives to see.
TAKEN: dict[str, tuple[float, ...]] = {
    "optimizer.lr": (0, 0.5, 1, HUGE),
    "optimizer.beta1": (0, 0.5),
    "optimizer.beta2": (0, 0.5),
    "optimizer.eps": (0, 0.5, 1, HUGE),
    "optimizer.weight_decay": (0, 0.5, 1, HUGE),
    "lr_scheduler.decay_ratio": (0, 0.5, 1),
    "lr_scheduler.min_lr_factor": (0, 0.5, 1),
    "activation_checkpoint.memory_budget": (0, 0.5, 1),
    "training.max_norm": (0.5, 1, HUGE, INF),
    "checkpoint.keep_latest_k": (0,),  # upstream wants two at least, or all
    "checkpoint.load_step": (-1, 0, 1),
    "training.seq_len": (),  # upstream wants an even number
    "training.dataloader.num_workers": (-1, 0, 1),
    "training.global_batch_size": (-1,),  # 1 is no multiple of the 8 rows of a batch
    **dict.fromkeys(
        (
            "validation.steps",
            "parallelism.data_parallel_shard_degree",
        ),
        (-1, 1),
    ),
    **dict.fromkeys(
        (
            "profiling.profiler_warmup",
            "lr_scheduler.warmup_steps",
            "validation.dataloader.num_workers",
            "parallelism.pipeline_parallel_first_stage_less_layers",
            "parallelism.pipeline_parallel_last_stage_less_layers",
            "comm.trace_buf_size",
            "fault_tolerance.replica_id",
            "fault_tolerance.group_size",
            "debug.seed",
        ),
        (0, 1),
    ),
}


def numbers(section: type, prefix: str = "") -> Iterator[tuple[str, tuple[float, ...]]]:
    """Every key that is a number, with the values to try."""
    kinds = typing.get_type_hints(section)
    for field in fields(section):
        kind, key = kinds[field.name], f"{prefix}{field.name}"
        parts = typing.get_args(kind) or (kind,)
        if is_dataclass(kind):
            yield from numbers(kind, f"{key}.")
        elif float in parts:
            yield key, REAL
        elif int in parts:
            yield key, WHOLE


NUMBERS = dict(numbers(TitanJobConfig))
# 1 is possible by itself; that it does not go together with others is another error.
CASES = [(key, value) for key, values in NUMBERS.items() for value in values]


def test_the_table_has_keys_of_upstream_only() -> None:
    assert set(TAKEN) <= set(NUMBERS)
    assert len(NUMBERS) > 40


@pytest.mark.parametrize(("key", "value"), CASES, ids=str)
def test_a_number_is_taken_or_told_with_its_key(key: str, value: float) -> None:
    job_config = config(training__dataset="alpaca")
    place, _, name = key.rpartition(".")
    setattr(attrgetter(place)(job_config), name, value)
    told = message_of(lambda: check(job_config), refusals=(ConfigError,)) or ""
    is_told = f"{key} is {value}; it must " in told
    assert is_told is (value not in TAKEN.get(key, (1,))), told


def test_all_are_told_at_once_and_nothing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {
        "metrics.log_freq": 0,
        "checkpoint.interval": 0,
        "training.local_batch_size": -4,
        "validation.steps": 0,
        "freezing.seed": -1,
        "optimizer.name": "Lion",
        "lr_scheduler.total_steps": 7,  # a possible number, too small beside another
    }
    arguments = [f"--{key}={value}" for key, value in wrong.items()]
    assert launch([f"--job.dump_folder={tmp_path}", *arguments], local_rank=0) == 2
    lines = capsys.readouterr().out.splitlines()
    for key in wrong:
        if key != "freezing.seed":  # nothing is frozen by default
            assert sum(line.startswith(f"  - {key} is ") for line in lines) == 1, key
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("dataset", "content", "told"),
    [
        ("c4_test", '{"words": "a"}', "KeyError: 'text'"),
        ("c4", '{"text": "a"}', "ValueError: BuilderConfig 'en' not found"),
        ("c4_test", "", ""),
    ],
)
def test_texts_that_cannot_be_read_are_told(
    dataset: str, content: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text(content)
    arguments = [
        f"--job.dump_folder={tmp_path}", f"--training.dataset={dataset}",
        f"--training.dataset_path={tmp_path / 'rows'}",
    ]  # fmt: skip
    assert launch(arguments, local_rank=0) == 2
    said = capsys.readouterr().out
    assert f"training.dataset is {dataset!r}, whose texts cannot be read from " in said
    assert told in said
    assert not dist.is_initialized()
