"""Errors in the cache of a frozen front: each names its key, before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from tests.torchtitan.helpers.job_configs import config, errors
from timelyfreeze.front.caching import EntryFolder
from timelyfreeze.policies.methods import freezes_by_turns, known_methods
from timelyfreeze.settings import CacheSettings
from torchtitan.freezing.checks import caches, check
from torchtitan.freezing.checks.front import cache_errors, cache_folder_errors
from torchtitan.freezing.config import JobConfig


def cached(settings: CacheSettings | None = None, **changes: Any) -> JobConfig:
    job_config = config(
        **{"freezing__method": "fixed", "training__dataset": "alpaca", **changes},
    )
    job_config.freezing.cache = settings or CacheSettings(enable=True)
    return job_config


PLANNED = sorted(method for method in known_methods() if "timelyfreeze" in method)


ALONE = sorted(m for m in known_methods() if freezes_by_turns(m) and m not in PLANNED)


@pytest.mark.parametrize("method", ALONE)
def test_policies_alone_freeze_alike_in_every_microbatch(method: str) -> None:
    check(cached(freezing__method=method))


@pytest.mark.parametrize("method", PLANNED)
def test_a_plan_is_refused(method: str) -> None:
    [line] = errors(cached(freezing__method=method))
    assert line == (
        f"freezing.cache.enable is true, and freezing.method is {method!r}, whose plan freezes "
        "other tensors in each microbatch; it must be a policy without a plan"
    )


def test_a_run_that_freezes_nothing_does_not_look_at_it() -> None:
    job_config = cached(CacheSettings(enable=True, memory_gib=-1.0), freezing__method="none")
    check(job_config)
    assert not caches(job_config)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"memory_gib": -1.0}, "freezing.cache.memory_gib is -1.0; it must be 0 or more"),
        ({"disk_gib": float("inf")}, "freezing.cache.disk_gib is inf; it must be 0 or more"),
        ({"memory_gib": 0.0}, "freezing.cache.memory_gib is 0.0, and freezing.cache.disk_gib too"),
        ({"disk_gib": 1.0, "folder": ""}, "freezing.cache.folder is empty"),
    ],
)
def test_rooms_that_make_no_sense(settings: dict[str, Any], rule: str) -> None:
    [line] = errors(cached(CacheSettings(enable=True, **settings)))
    assert line.startswith(rule)
    check(cached(CacheSettings(enable=False, **settings)))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"training__dataset": "c4_test"}, "training.dataset is 'c4_test', whose rows have no"),
        ({"data__packing": True}, "data.packing is true, with which each epoch has other"),
        (
            {"parallelism__tensor_parallel_degree": 2},
            "parallelism.tensor_parallel_degree is 2; it must be 1",
        ),
        (
            {"model__name": "qwen3"},
            "model.name is 'qwen3'; only the blocks of llama3 are known to compute a row from "
            "nothing but its tokens",
        ),
    ],
)
def test_what_keeps_rows_from_coming_again(changes: dict[str, Any], rule: str) -> None:
    """Dropout, batch norm, packing and split rows (Egeria, Sec. 4.3) are other rows each time."""
    [line] = [line for line in errors(cached(**changes)) if "cache" in line]
    assert line.startswith(f"freezing.cache.enable is true, and {rule}")


@pytest.mark.parametrize("replicate", [1, 2])
def test_replicas_may_have_it(replicate: int) -> None:
    degrees = {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": replicate}
    changes = {f"parallelism__{name}": degree for name, degree in degrees.items()}
    assert list(cache_errors(cached(**changes))) == []


def test_a_folder_that_cannot_be_used_is_told_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_config = cached(CacheSettings(enable=True, disk_gib=1.0), job__dump_folder=str(tmp_path))
    assert list(cache_folder_errors(job_config)) == []
    held = EntryFolder(tmp_path / "activation_cache", 1, 1)
    assert list(cache_folder_errors(job_config)) == []
    monkeypatch.setenv("RANK", "1")
    [line] = cache_folder_errors(job_config)
    assert line == (
        "freezing.cache.folder is 'activation_cache', which another run uses; name another folder"
    )
    held.close()
    assert list(cache_folder_errors(job_config)) == []
    (tmp_path / "file").touch()
    job_config.freezing.cache = CacheSettings(enable=True, disk_gib=1.0, folder="file")
    [line] = cache_folder_errors(job_config)
    assert "is no folder" in line
