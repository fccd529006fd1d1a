"""What lies beside exported weights: loaded by transformers, and speaking as it was trained."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torchtitan.helpers.chat_tokenizers import GUEST, TINY, tokenizer_folder
from tests.torchtitan.helpers.hf_models import FAMILIES, some_tokens, write_folder
from tests.torchtitan.hf.test_export import save_run, trained
from torchtitan.hf.export import export_run, known_ids, write_generation_config
from torchtitan.hf.llama_config import read_config

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
# More words than the tokenizer with tokens of chat templates has.
WIDE = {**FAMILIES["qwen3"], "vocab_size": 2056, "num_hidden_layers": 2}
IM_END, EOT = 2049, 2052
MESSAGES = [{"role": "user", "content": "What is 2 + 2?"}]


def source_folder(place: Path, generation: dict[str, Any] | None = None, **config: Any) -> Path:
    source = tokenizer_folder(place / "model", **config)
    write_folder(source, WIDE)
    if generation is not None:
        (source / "generation_config.json").write_text(json.dumps(generation))
    return source


def exported(place: Path, source: Path, template: str = "plain", dataset: str = "alpaca") -> Path:
    run = save_run(place, trained(source), hf_assets_path=str(source))
    settings = json.loads((run / "settings.json").read_text())
    settings["data"]["chat_template"] = template
    settings["training"]["dataset"] = dataset
    (run / "settings.json").write_text(json.dumps(settings))
    return export_run(run)


def generation_of(folder: Path) -> Any:
    return json.loads((folder / "generation_config.json").read_text())


def test_settings_of_generation_go_along_as_they_are(tmp_path: Path) -> None:
    given = {"eos_token_id": [1, 7], "temperature": 0.6, "do_sample": True}
    assert generation_of(exported(tmp_path, source_folder(tmp_path, given))) == given


def test_code_that_stays_behind_is_not_named(tmp_path: Path) -> None:
    """Whoever trusts remote code would miss its file; others would not be asked."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    source = source_folder(tmp_path, auto_map={"AutoTokenizer": ["own.Tokenizer", None]})
    config = json.loads((source / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (source / "config.json").write_text(json.dumps(config))
    (source / "own.py").write_text("raise SystemError('executed')")
    folder = exported(tmp_path, source)
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        auto.from_pretrained(folder, trust_remote_code=True)


def test_without_any_they_have_the_ids_of_the_model(tmp_path: Path) -> None:
    folder = exported(tmp_path, source_folder(tmp_path))
    assert generation_of(folder) == {"bos_token_id": 0, "eos_token_id": 1}


def test_ids_that_nothing_names_are_the_tokenizers(tmp_path: Path) -> None:
    """A model from random weights: transformers would take ids of LLaMA 2 instead."""
    from torchtitan.data.text.tokenizer import FolderTokenizer
    from torchtitan.hf.flavors import EXTRA_FLAVORS

    source = source_folder(tmp_path)
    tokenizer = FolderTokenizer(str(TINY))
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    assert known_ids(tokenizer) == ids
    assert len(set(ids.values())) == 2
    assets = tmp_path / "assets"
    shutil.copytree(TINY, assets)
    EXTRA_FLAVORS["llama3"]["wide"] = read_config(source)
    try:
        run = save_run(tmp_path, trained(source), hf_assets_path=str(assets), flavor="wide")
        folder = export_run(run)
    finally:
        del EXTRA_FLAVORS["llama3"]["wide"]
    config = json.loads((folder / "config.json").read_text())
    assert {key: config[key] for key in ids} == ids
    assert generation_of(folder) == ids


@pytest.mark.parametrize(
    ("template", "stops"),
    [("chatml", [1, IM_END]), ("llama3", [1, EOT]), ("alpaca", 1), ("plain", 1)],
)
def test_generation_stops_where_answers_were_trained_to_end(
    tmp_path: Path, template: str, stops: Any
) -> None:
    folder = exported(tmp_path, source_folder(tmp_path), template)
    assert generation_of(folder)["eos_token_id"] == stops
    assert (folder / "chat_template.jinja").is_file() is (template != "plain")


@pytest.mark.parametrize("template", ["tokenizer", "chatml"])
def test_templates_for_tools_are_those_that_were_trained_with(
    tmp_path: Path, template: str
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    source = source_folder(tmp_path)
    (source / "additional_chat_templates").mkdir()
    (source / "chat_template.jinja").write_text(GUEST)
    (source / "additional_chat_templates" / "tool_use.jinja").write_text(f"{{{{ tools }}}}{GUEST}")
    folder = exported(tmp_path, source, template)
    given = [
        transformers.AutoTokenizer.from_pretrained(place).apply_chat_template(
            MESSAGES, tools=[{"name": "add"}], tokenize=False
        )
        for place in (source, folder)
    ]
    assert (given[0] == given[1]) is (template == "tokenizer")
    assert given[1].startswith("[{" if template == "tokenizer" else "<|im_start|>user")


def test_a_tokenizer_comes_whole_from_the_folder_that_was_trained_with(tmp_path: Path) -> None:
    given = {"temperature": 0.5, "eos_token_id": 5, "pad_token_id": 3}
    source = source_folder(tmp_path, given, chat_template=GUEST)
    for name in ("merges.txt", "special_tokens_map.json"):
        (source / name).write_text("{}")
    settings = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(settings | {"eos_token_id": 7}))
    run = save_run(tmp_path, trained(source), hf_assets_path=str(source))
    settings = json.loads((run / "settings.json").read_text())
    settings["model"]["hf_assets_path"] = str(tokenizer_folder(tmp_path / "other"))
    settings["checkpoint"] |= {"initial_load_in_hf": True, "initial_load_path": str(source)}
    settings["training"]["dataset"] = "alpaca"
    settings["data"]["chat_template"] = "chatml"
    (run / "settings.json").write_text(json.dumps(settings))
    folder = export_run(run)
    names = {path.name for path in folder.iterdir()}
    assert names.isdisjoint({"merges.txt", "special_tokens_map.json"})
    there = json.loads((folder / "tokenizer_config.json").read_text())
    assert there == json.loads((tmp_path / "other" / "tokenizer_config.json").read_text())
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 1
    ids = {"bos_token_id": 0, "eos_token_id": [1, IM_END], "pad_token_id": 2}
    assert generation_of(folder) == {"temperature": 0.5, **ids}


def test_a_template_of_other_data_is_not_written(tmp_path: Path) -> None:
    folder = exported(tmp_path, source_folder(tmp_path), "chatml", dataset="c4_test")
    assert not (folder / "chat_template.jinja").exists()


@pytest.mark.parametrize(
    ("given", "end", "expected"),
    [
        ({"eos_token_id": 3}, 4, [3, 4]),
        ({"eos_token_id": [3, 4]}, 4, [3, 4]),
        ({"eos_token_id": 3}, 3, 3),
        ({"temperature": 1.0}, 4, [9, 4]),  # the configuration's goes on
        ({"eos_token_id": 3}, None, 3),
        ({"eos_token_id": None}, 4, [9, 4]),  # a null is not there
        ({"eos_token_id": [None, 3]}, 4, [3, 4]),
        ({"eos_token_id": None}, None, None),
        ({"eos_token_id": None}, 9, 9),  # a null would let the model talk on
        ({"eos_token_id": [None, 3]}, 3, 3),
    ],
)
def test_an_end_is_added_once(
    tmp_path: Path, given: dict[str, Any], end: int | None, expected: Any
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    write_generation_config(tmp_path, {"eos_token_id": 9}, end)
    assert generation_of(tmp_path) == {**given, "eos_token_id": expected}


def test_an_id_that_is_null_is_the_tokenizers(tmp_path: Path) -> None:
    source = source_folder(tmp_path, {"eos_token_id": None})
    config = json.loads((source / "config.json").read_text()) | {"eos_token_id": None}
    (source / "config.json").write_text(json.dumps(config))
    folder = exported(tmp_path, source, "chatml")
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 1
    assert generation_of(folder)["eos_token_id"] == [1, IM_END]


@pytest.mark.parametrize("template", ["tokenizer", "chatml"])
def test_transformers_loads_the_folder_and_generates_as_the_model_does(
    tmp_path: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    source = source_folder(tmp_path, {"eos_token_id": 1}, chat_template=GUEST)
    folder = exported(tmp_path, source, template)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    question = "What is 2 + 2?"
    assert (
        text
        == {
            "tokenizer": f"[sys]Be brief.\n[user]{question}\n[bot]",
            "chatml": f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
        }[template]
    )
    settings = transformers.GenerationConfig.from_pretrained(folder)
    assert settings.eos_token_id == (1 if template == "tokenizer" else [1, IM_END])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = some_tokens(1, 8)
    found = theirs.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=-1)
    ours = trained(source)  # the same again
    expected = prompt
    with torch.no_grad():
        for _ in range(6):
            following = ours(expected)[:, -1].argmax(-1, keepdim=True)
            expected = torch.cat([expected, following], dim=1)
    assert torch.equal(found, expected)
