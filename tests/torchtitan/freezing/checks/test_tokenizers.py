"""Errors about tokenizers: files that are missing or cut, ids that the model does not have."""

import json
import shutil
from pathlib import Path

import pytest

from tests.torchtitan.helpers.job_configs import make_job_config
from torchtitan.freezing.checks import ConfigError, check
from torchtitan.freezing.checks.data import tokenizer_errors

ASSETS = Path(__file__).parents[3] / "assets" / "tokenizer"


def errors(folder: Path) -> list[str]:
    return list(tokenizer_errors(make_job_config(model__hf_assets_path=str(folder))))


def test_a_whole_tokenizer_is_fine() -> None:
    assert errors(ASSETS) == []


def test_a_missing_one_is_told(tmp_path: Path) -> None:
    assert errors(tmp_path / "no") == [
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
