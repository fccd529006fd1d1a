import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.torchtitan.helpers.chat_tokenizers import GUEST, tokenizer_folder
from tests.torchtitan.helpers.job_configs import make_job_config
from torchtitan.data.sources import ALL_EXAMPLES, ExampleSplit
from torchtitan.freezing.checks import ConfigError, check
from torchtitan.freezing.checks.data import (
    data_errors,
    example_errors,
    reads_training_examples,
    tokenizer_errors,
    validation_errors,
    validation_split,
)
from torchtitan.freezing.checks.features import FEATURES
from torchtitan.freezing.checks.requirements import feature_errors
from torchtitan.freezing.launch import read_config
from torchtitan.freezing.values.errors import place_errors
from torchtitan.settings import JobConfig


def config(**changes: Any) -> JobConfig:
    values = {"training__dataset": "alpaca", **changes}
    return make_job_config(**values)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"data__packing": True, "data__chat_template": "llama3"},
        {"training__dataset": "c4_test"},
        {"parallelism__tensor_parallel_degree": 2},
        {"data__paths": ["a", "b"], "data__weights": [0.5, 2], "training__dataset": "auto"},
        {"data__paths": ["a/b", "a/b"], "data__subset": ["en", "de"]},
    ],
)
def test_a_sound_configuration_has_no_errors(changes: dict[str, Any]) -> None:
    assert list(data_errors(config(**changes))) == []


def test_a_template_may_be_for_validation_alone() -> None:
    texts = {"training__dataset": "c4_test", "data__chat_template": "chatml"}
    validated = {"validation__enable": True, "validation__dataset": "sharegpt"}
    assert list(feature_errors(config(**texts, **validated), FEATURES)) == []
    (error,) = feature_errors(config(**texts), FEATURES)
    assert error.startswith("data.chat_template is 'chatml', and training.dataset is 'c4_test'; ")


def test_the_template_of_a_folder_must_be_there(tmp_path: Path) -> None:
    bare = tokenizer_folder(tmp_path / "bare")
    settings = {"data__chat_template": "tokenizer"}
    (error,) = data_errors(config(**settings, model__hf_assets_path=str(bare)))
    assert "has no chat template" in error
    assert "choose one of auto, plain" in error
    whole = tokenizer_folder(tmp_path / "whole", chat_template=GUEST)
    assert list(data_errors(config(**settings, model__hf_assets_path=str(whole)))) == []


def test_keys_of_the_hub_are_not_for_files(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x", "completion": "y"}\n')
    there = {"training__dataset": "auto", "training__dataset_path": str(path)}
    assert list(example_errors(config(**there))) == []
    (error,) = example_errors(config(**there, data__revision="v1"))
    assert error.startswith(f"training.dataset_path has {str(path)!r}, which is on this disk; data")


def test_earlier_turns_need_a_model_that_sees_them(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    row = {"instruction": "x", "output": "y", "history": [["a", "b"]]}
    path.write_text(f"{json.dumps(row)}\n")
    there = {"training__dataset_path": str(path)}
    assert list(example_errors(config(**there))) == []
    (error,) = example_errors(config(**there, model__flavor="debugmodel_flex_attn"))
    assert error.startswith(f"{path}, line 1: has earlier turns (history), and model.flavor ends a")


def test_a_missing_file_is_told_as_such_though_validation_names_another(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"instruction": "x", "output": "y"}\n')
    typo = str(tmp_path / "row.jsonl")
    places = {"training__dataset_path": typo, "validation__dataset_path": str(path)}
    wrong = held_out_config(**places)
    assert list(validation_errors(wrong)) == []
    (error,) = example_errors(wrong)
    assert error.startswith(f"training.dataset_path is {typo!r}; there is no such file")


@pytest.mark.parametrize(
    "words",
    [
        ["--data.packing=true", "--data.no-shuffle", "--lora.targets", "wq", "wv", "--data.seed=3"],
        ["--data.packing", "--data.shuffle=false", "--lora.targets=wq,wv", "--data.seed", "3"],
        ["--data.packing=false", "--data.packing=true", "--data.shuffle=false", "--data.seed=3",
         "--lora.targets=wq", "wv"],
    ],
)  # fmt: skip
def test_keys_of_the_command_line_may_be_spelled_in_both_ways(words: list[str]) -> None:
    found = read_config(words)
    assert (found.data.packing, found.data.shuffle, found.data.seed) == (True, False, 3)
    assert found.lora.targets == ["wq", "wv"]


def test_a_key_that_is_none_is_answered_by_those_that_hold_its_word() -> None:
    nearest = "the nearest is training.local_batch_size and training.global_batch_size"
    with pytest.raises(ConfigError, match=f"training.batch_size is no key .*; {nearest}"):
        read_config(["--training.batch_size=3"])


def test_validation_reads_the_data_of_training_unless_told_otherwise() -> None:
    words = ["--training.dataset=alpaca", "--validation.enable"]
    assert read_config(words).validation.dataset == "alpaca"
    assert read_config([*words, "--validation.dataset=sharegpt"]).validation.dataset == "sharegpt"
    assert read_config(["--validation.enable"]).validation.dataset == "c4_validation"


def test_they_are_among_the_checks_of_a_run() -> None:
    with pytest.raises(ConfigError, match=r"data\.chat_template is 'x'; known"):
        check(config(data__chat_template="x"))


def held_out_config(**changes: Any) -> JobConfig:
    """Training and validation on the same examples, a tenth held out, then the changes."""
    values = {
        "training__dataset": "alpaca",
        "training__dataset_path": "some/examples",
        "training__seq_len": 128,
        "training__local_batch_size": 16,
        "parallelism__pipeline_parallel_degree": 2,
        "parallelism__pipeline_parallel_microbatch_size": 2,
        "validation__enable": True,
        "validation__dataset": "alpaca",
        "validation__dataset_path": "some/examples",
        "validation__seq_len": 128,
        "validation__local_batch_size": 8,
        "data__validation_fraction": 0.1,
        **changes,
    }
    return make_job_config(**values)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"validation__seq_len": 64, "validation__local_batch_size": 24},
        {"data__validation_fraction": 0.0},
        {"data__validation_fraction": 0.0, "validation__dataset": "c4_test"},
        {"data__validation_fraction": 0.0, "training__dataset": "c4_test"},
        # Held out for a validation that runs another time, or elsewhere.
        {"validation__enable": False, "validation__dataset": "c4_test"},
        {"validation__enable": False, "validation__seq_len": 4096, "validation__freq": 0},
        {"parallelism__pipeline_parallel_degree": 1, "validation__local_batch_size": 3},
    ],
)
def test_a_sound_validation_has_no_errors(changes: dict[str, Any]) -> None:
    assert list(validation_errors(held_out_config(**changes))) == []


def test_upstreams_defaults_have_no_errors() -> None:
    assert list(validation_errors(JobConfig())) == []


def test_microbatches_that_do_not_fit_are_told_elsewhere() -> None:
    """``checks`` refuses a microbatch size that does not divide the batch."""
    for size in (0, 3):
        changes = {"parallelism__pipeline_parallel_microbatch_size": size}
        assert list(validation_errors(held_out_config(**changes))) == []


def test_validation_reads_what_training_holds_out() -> None:
    assert validation_split(held_out_config()) == ExampleSplit(0.1, held_out=True)
    assert not reads_training_examples(held_out_config())


def test_validation_on_all_examples_of_the_training_data_is_noticed() -> None:
    same = held_out_config(data__validation_fraction=0.0)
    assert validation_split(same) == ALL_EXAMPLES
    assert reads_training_examples(same)


def test_other_data_is_read_as_a_whole() -> None:
    other = held_out_config(
        data__validation_fraction=0.0, validation__dataset_path="other/examples"
    )
    assert validation_split(other) == ALL_EXAMPLES
    assert not reads_training_examples(other)


ASSETS = Path(__file__).parents[3] / "assets" / "tokenizer"


def errors(folder: Path) -> list[str]:
    return list(tokenizer_errors(make_job_config(model__hf_assets_path=str(folder))))


def test_a_whole_tokenizer_is_fine() -> None:
    assert errors(ASSETS) == []


def test_a_missing_one_is_told(tmp_path: Path) -> None:
    missing = config(model__hf_assets_path=str(tmp_path / "no"))
    assert list(place_errors(missing)) == [
        f"model.hf_assets_path is {str(tmp_path / 'no')!r}, which is no folder; it must hold the "
        "tokenizer"
    ]
    assert "which holds no tokenizer.json; where transformers reads" in errors(tmp_path)[0]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.99])
def test_a_half_written_one_is_told(name: str, fraction: float, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(ASSETS, folder)
    text = (ASSETS / name).read_bytes().rstrip()
    (folder / name).write_bytes(text[: int(fraction * len(text))])
    (error,) = errors(folder)
    assert "whose tokenizer cannot be used (tokenizer.json, tokenizer_config.json): " in error
    assert name == "tokenizer.json" or f"{name} is not JSON" in error


def test_it_is_among_the_checks_of_a_run_that_trains(tmp_path: Path) -> None:
    config = make_job_config(model__hf_assets_path=str(tmp_path))
    check(config)
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json"):
        check(config, trains=True)


def test_one_of_another_model_is_told_by_its_ids(tmp_path: Path) -> None:
    few = make_job_config(model__hf_assets_path=str(ASSETS), model__vocab_size=100)
    (error,) = tokenizer_errors(few)
    assert "with id 2047; model.flavor 'debugmodel' has 100 embeddings" in error
    assert "set model.vocab_size to 2048 or more" in error
    # Few tokens, but numbers that leave a gap.
    text = json.loads((ASSETS / "tokenizer.json").read_text())
    shutil.copytree(ASSETS, tmp_path / "t")
    text["model"]["vocab"] = {**text["model"]["vocab"], "zebra": 5000}
    (tmp_path / "t/tokenizer.json").write_text(json.dumps(text))
    (error,) = errors(tmp_path / "t")
    assert "has token 'zebra' with id 5000" in error


def test_a_template_that_the_tokenizer_cannot_write_is_told(tmp_path: Path) -> None:
    config = make_job_config(
        model__hf_assets_path=str(ASSETS),
        training__dataset="alpaca",
        data__chat_template="llama3",
    )
    (error,) = tokenizer_errors(config)
    assert "data.chat_template is 'llama3'" in error
