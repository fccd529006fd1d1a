from pathlib import Path
from typing import Any

import pytest

from tests.torchtitan.helpers.chat_tokenizers import GUEST, tokenizer_folder
from tests.torchtitan.helpers.job_configs import make_job_config
from torchtitan.freezing.checks.configuration import ConfigError, check
from torchtitan.freezing.checks.data import data_errors
from torchtitan.freezing.config.job_config import JobConfig


def config(**changes: Any) -> JobConfig:
    values = {"training__dataset": "alpaca", **changes}
    return make_job_config(**values)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"data__packing": True, "data__chat_template": "llama3"},
        {"training__dataset": "c4_test"},
        {
            "training__dataset": "c4_test",
            "data__chat_template": "chatml",
            "validation__enable": True,
            "validation__dataset": "sharegpt",
        },
        {"parallelism__tensor_parallel_degree": 2},
    ],
)
def test_a_sound_configuration_has_no_errors(changes: dict[str, Any]) -> None:
    assert list(data_errors(config(**changes))) == []


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"data__chat_template": "Llama3"}, ["data.chat_template is 'Llama3'; known: plain, tok"]),
        (
            {"data__chat_template": "llama3", "training__dataset": "c4_test"},
            ["data.chat_template is 'llama3'", "training.dataset is 'c4_test'", "must be 'plain'"],
        ),
        (
            {"data__packing": True, "training__dataset": "c4_test"},
            ["data.packing is true", "training.dataset is 'c4_test'", "must be false"],
        ),
        (
            {"data__packing": True, "parallelism__tensor_parallel_degree": 2},
            ["data.packing is true", "parallelism.tensor_parallel_degree is 2", "must be 1"],
        ),
        (
            {"data__packing": True, "parallelism__context_parallel_degree": 4},
            ["data.packing is true", "parallelism.context_parallel_degree is 4", "must be 1"],
        ),
    ],
)
def test_an_error_is_told_with_its_key_its_value_and_the_rule(
    changes: dict[str, Any], parts: list[str]
) -> None:
    (error,) = data_errors(config(**changes))
    for part in parts:
        assert part in error


def test_the_template_of_a_folder_must_be_there(tmp_path: Path) -> None:
    bare = tokenizer_folder(tmp_path / "bare")
    settings = {"data__chat_template": "tokenizer"}
    (error,) = data_errors(config(**settings, model__hf_assets_path=str(bare)))
    assert "has no chat template" in error
    whole = tokenizer_folder(tmp_path / "whole", chat_template=GUEST)
    assert list(data_errors(config(**settings, model__hf_assets_path=str(whole)))) == []


def test_they_are_among_the_checks_of_a_run() -> None:
    with pytest.raises(ConfigError, match=r"data\.chat_template is 'x'; known"):
        check(config(data__chat_template="x"))
