"""Errors in ``[lora]``, before anything starts."""

from typing import Any

import pytest

from tests.torchtitan.helpers.job_configs import config as plain_config
from tests.torchtitan.helpers.job_configs import errors
from torchtitan.freezing.checks import check, requirements


@pytest.fixture(autouse=True)
def _peft_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda name: object())


def config(**changes: Any) -> Any:
    return plain_config(**{"freezing__method": "lora", "model__flavor": "debugmodel", **changes})


@pytest.mark.parametrize("targets", [[], ["wq"], ["attention.wq", "layers.0.feed_forward.w1"]])
def test_what_the_model_has_is_taken(targets: list[str]) -> None:
    check(config(lora__targets=targets))
    check(config(lora__targets=targets, parallelism__pipeline_parallel_degree=1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora__rank": 0}, ["lora.rank is 0; it must be 1 or more"]),
        ({"lora__alpha": 0.0}, ["lora.alpha is 0.0; it must be above 0 and finite"]),
        (
            {"lora__learning_rate": float("inf")},
            ["lora.learning_rate is inf; it must be above 0 and finite"],
        ),
        ({"freezing__seed": -1}, ["freezing.seed is -1"]),
        (
            {"lora__targets": ["wq", "q_proj"]},
            ["lora.targets has 'q_proj'", "no linear layer of model.flavor 'debugmodel'",
             "there are wq, wk, wv, wo, w1, w2, w3, output"],
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_told_with_its_key(changes: dict[str, Any], words: list[str]) -> None:
    (line,) = errors(config(**changes))
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("targets", "places"),
    [
        (["layers.0.attention.wq"], ["rank 1", "rank 2", "rank 3"]),
        (["layers.1.attention.wq", "output"], ["stage 0", "rank 0", "rank 2"]),
    ],
)
def test_each_rank_and_the_first_stage_have_something_to_learn(
    targets: list[str], places: list[str]
) -> None:
    found = errors(config(lora__targets=targets))
    assert [line.split(" of ")[1].split(" (")[0] for line in found] == places
