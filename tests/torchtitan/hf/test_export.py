"""Checkpoints turned into Hugging Face folders, compared with the model that was saved."""

import errno
import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file
from torchtitan.models.llama3 import Transformer

import torchtitan.hf.weights as hf_weights
from tests.torchtitan.helpers.hf_models import (
    FAMILIES,
    logits_of,
    read_folder,
    some_tokens,
    write_folder,
)
from tests.torchtitan.hf.test_adapter import load
from torchtitan.checkpoints.contents import METADATA, read_contents
from torchtitan.hf import export
from torchtitan.hf.adapter import tensor_errors
from torchtitan.hf.export import export_run
from torchtitan.hf.folder import stored_shapes
from torchtitan.hf.llama_config import parse_config, read_config
from torchtitan.settings.job_config import JobConfig
from torchtitan.vision.export_command import main

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.slow]


def save_run(
    place: Path, model: torch.nn.Module, *, step: int = 10, more: Any = None, **model_keys: Any
) -> Path:
    """Write what a run leaves: its settings, and a checkpoint as upstream writes it."""
    job_config = JobConfig()
    job_config.job.dump_folder = str(place / "outputs")
    for key, value in {"name": "llama3", "flavor": "hf", **model_keys}.items():
        setattr(job_config.model, key, value)
    job_config.checkpoint.initial_load_in_hf = True
    run = place / "outputs" / "tb" / "run"
    run.mkdir(parents=True, exist_ok=True)
    (run / "settings.json").write_text(json.dumps(job_config.to_dict()))
    state = {**model.state_dict(), **(more or {})}
    dcp.save(state, checkpoint_id=place / "outputs" / "checkpoint" / f"step-{step}", no_dist=True)
    return run


def trained(folder: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    """The model of ``folder`` after something has moved every weight."""
    model = load(folder, dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator).to(dtype))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("n_files", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_and_exported_is_the_same_to_the_last_bit(
    tmp_path: Path, family: str, n_files: int
) -> None:
    source = write_folder(tmp_path / "model", FAMILIES[family], n_files=n_files)
    folder = export_run(save_run(tmp_path, load(source), hf_assets_path=str(source)))
    (before, weights), (after, exported) = read_folder(source), read_folder(folder)
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
    assert parse_config(after) == parse_config(before)
    assert {**before, "dtype": "float32"} == after


@pytest.mark.parametrize("training", [torch.float32, torch.bfloat16])
def test_bfloat16_survives_training_in_either_precision(
    tmp_path: Path, training: torch.dtype
) -> None:
    source = write_folder(tmp_path / "model", FAMILIES["smollm2"], dtype=torch.bfloat16)
    run = save_run(tmp_path, load(source, training), hf_assets_path=str(source))
    folder = export_run(run, dtype=torch.bfloat16 if training == torch.float32 else None)
    weights, exported = read_folder(source)[1], read_folder(folder)[1]
    assert exported.keys() == weights.keys()
    assert all(exported[name].dtype == torch.bfloat16 for name in weights)
    assert all(torch.equal(exported[name], weights[name]) for name in weights)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_model_computes_the_same_from_its_folder(tmp_path: Path, family: str) -> None:
    source = write_folder(tmp_path / "model", FAMILIES[family])
    model = trained(source)
    folder = export_run(save_run(tmp_path, model, hf_assets_path=str(source)))
    tokens = some_tokens(2, 64)
    with torch.no_grad():
        expected = model(tokens)
    assert (expected - logits_of(source, tokens)).abs().max() > 0.1, "nothing was trained"
    torch.testing.assert_close(logits_of(folder, tokens), expected, atol=1e-4, rtol=0)
    assert list(tensor_errors(read_config(folder), stored_shapes(folder))) == []
    assert not read_config(folder).tie_word_embeddings


def test_a_folder_is_split_into_files_that_stay_below_the_limit(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model", FAMILIES["llama3"])
    run = save_run(tmp_path, load(source), hf_assets_path=str(source))
    folder = export_run(run, max_file_bytes=600_000)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    weights, exported = read_folder(source)[1], read_folder(folder)[1]
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights.values())
    assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}
    per_file: dict[str, int] = {}
    for name, file in index["weight_map"].items():
        per_file[file] = per_file.get(file, 0) + weights[name].nbytes
    assert max(per_file.values()) <= 600_000


def test_no_more_than_a_file_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_folder(tmp_path / "model", FAMILIES["llama3"])
    run = save_run(tmp_path, load(source), hf_assets_path=str(source))
    read: list[int] = []
    original = hf_weights.dcp.load

    def noted(weights: Any, **kwargs: Any) -> None:
        read.append(sum(tensor.nbytes for tensor in weights.values()))
        original(weights, **kwargs)

    monkeypatch.setattr(hf_weights.dcp, "load", noted)
    export_run(run, max_file_bytes=600_000)
    assert max(read) <= 600_000


def test_weights_may_be_read_by_whom_the_other_files_may(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", FAMILIES["llama3"])
    folder = export_run(save_run(tmp_path, trained(source), hf_assets_path=str(source)))
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


def test_the_optimizers_state_stays_behind(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model", FAMILIES["llama3"])
    state = {"optimizer.state.layers.0.attention.wq.weight.exp_avg": torch.ones(64, 64)}
    run = save_run(tmp_path, load(source), more=state, hf_assets_path=str(source))
    assert read_folder(export_run(run))[1].keys() == read_folder(source)[1].keys()


def test_the_last_step_is_taken_unless_another_is_named(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model", FAMILIES["llama3"])
    run = save_run(tmp_path, load(source), step=9, hf_assets_path=str(source))
    save_run(tmp_path, trained(source), step=10, hf_assets_path=str(source))
    (tmp_path / "outputs" / "checkpoint" / "step-11").mkdir()  # not finished
    weights = read_folder(source)[1]["lm_head.weight"]
    assert export_run(run) == run / "hf_step-10"
    assert not torch.equal(read_folder(run / "hf_step-10")[1]["lm_head.weight"], weights)
    assert export_run(run, 9) == run / "hf_step-9"
    assert torch.equal(read_folder(run / "hf_step-9")[1]["lm_head.weight"], weights)
    with pytest.raises(ValueError, match="no checkpoint of step 11; it has 9, 10"):
        export_run(run, 11)


def test_a_run_may_have_been_moved_with_its_checkpoints(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model", FAMILIES["llama3"])
    save_run(tmp_path, load(source), hf_assets_path=str(source))
    (tmp_path / "outputs").rename(tmp_path / "moved")
    folder = export_run(tmp_path / "moved" / "tb" / "run")
    assert folder == tmp_path / "moved" / "tb" / "run" / "hf_step-10"
    assert read_folder(folder)[1].keys() == read_folder(source)[1].keys()


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model", FAMILIES["llama3"])
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "pytorch_model.bin").write_bytes(b"old")
    folder = export_run(save_run(tmp_path, load(source), hf_assets_path=str(source)))
    assert sorted(path.name for path in folder.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_a_model_that_began_from_random_weights_gets_a_configuration(tmp_path: Path) -> None:
    """Its folder of assets has a tokenizer, and perhaps the configuration of another model."""
    assets = write_folder(tmp_path / "assets", FAMILIES["smollm2"])
    (assets / "model.safetensors").unlink()
    source = write_folder(tmp_path / "model", FAMILIES["llama31"])
    from torchtitan.hf.flavors import EXTRA_FLAVORS

    EXTRA_FLAVORS["llama3"]["small_31"] = read_config(source)
    try:
        run = save_run(tmp_path, load(source), hf_assets_path=str(assets), flavor="small_31")
        folder = export_run(run)
    finally:
        del EXTRA_FLAVORS["llama3"]["small_31"]
    settings = read_folder(folder)[0]
    assert read_config(folder) == read_config(source)
    assert (settings["bos_token_id"], settings["eos_token_id"]) == (0, 1)
    tokens = some_tokens(1, 80)
    torch.testing.assert_close(
        logits_of(folder, tokens), logits_of(source, tokens), atol=1e-5, rtol=0
    )


def test_what_cannot_be_exported_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"settings\.json cannot be read"):
        export_run(tmp_path)
    source = write_folder(tmp_path / "model", FAMILIES["llama3"])
    run = save_run(tmp_path, load(source), hf_assets_path=str(source))
    export_run(run)
    with pytest.raises(ValueError, match="is there already"):
        export_run(run)
    with pytest.raises(ValueError, match="is no folder; name another with --output"):
        export_run(run, output=run / "settings.json" / "hf")
    settings = json.loads((run / "settings.json").read_text())
    settings["model"]["name"] = "qwen3"
    (run / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"model\.name is 'qwen3'"):
        export_run(run)
    settings["model"]["name"] = "llama3"
    settings["checkpoint"]["folder"] = "elsewhere"
    (run / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="has no finished checkpoint"):
        export_run(run)


def test_a_failed_export_leaves_no_folder(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model", FAMILIES["llama3"])
    model = load(source)
    del model.layers["5"]
    run = save_run(tmp_path, model, hf_assets_path=str(source))
    with pytest.raises(ValueError, match=r"lacks layers\.5"):
        export_run(run)
    assert not (run / "hf_step-10").exists()


def test_a_folder_of_the_users_that_looks_unfinished_stays(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model", FAMILIES["llama3"])
    run = save_run(tmp_path, load(source), hf_assets_path=str(source))
    (tmp_path / "hf.part").mkdir()
    (tmp_path / "hf.part" / "notes.txt").write_text("the user's")
    export_run(run, output=tmp_path / "hf")
    assert (tmp_path / "hf.part" / "notes.txt").read_text() == "the user's"
    assert {path.name for path in tmp_path.glob("hf*")} == {"hf", "hf.part"}


def test_of_two_exports_to_one_place_one_is_whole_and_the_other_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_folder(tmp_path / "model", FAMILIES["llama3"])
    run = save_run(tmp_path, load(source), hf_assets_path=str(source))
    really_write, output = export.write_weights, tmp_path / "hf"

    def meanwhile(folder: Path, *rest: Any) -> None:
        really_write(folder, *rest)
        monkeypatch.setattr(export, "write_weights", really_write)
        export_run(run, output=output)

    monkeypatch.setattr(export, "write_weights", meanwhile)
    with pytest.raises(ValueError, match=r"hf' cannot be written: Directory not empty"):
        export_run(run, output=output)
    assert read_folder(output)[1].keys() == read_folder(source)[1].keys()
    assert [path.name for path in tmp_path.glob("hf*")] == ["hf"]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left"), SafetensorError("No space left")]
)
def test_a_full_disk_is_told_and_nothing_stays(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_folder(tmp_path / "model", FAMILIES["llama3"])
    run = save_run(tmp_path, load(source), hf_assets_path=str(source))

    def full(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(hf_weights, "save_file", full)
    with pytest.raises(ValueError, match=r"hf' cannot be written: No space left$"):
        export_run(run, output=tmp_path / "hf")
    assert not list(tmp_path.glob("hf*"))


def test_the_tokenizer_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_folder(tmp_path / "model", FAMILIES["llama3"])
    (source / "tokenizer.json").write_text("{}")
    run = save_run(tmp_path, load(source), hf_assets_path="model")
    settings = json.loads((run / "settings.json").read_text())
    settings["job"]["dump_folder"] = "outputs"
    (run / "settings.json").write_text(json.dumps(settings))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    folder = export_run(run)
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert parse_config(read_folder(folder)[0]) == parse_config(read_folder(source)[0])


def test_a_tokenizer_that_is_not_found_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's output may lie anywhere, so nothing tells where the run was started."""
    source = write_folder(tmp_path / "model", FAMILIES["llama3"])
    run = save_run(tmp_path, load(source), hf_assets_path="model")
    monkeypatch.chdir(tmp_path)
    assert (export_run(run) / "config.json").exists()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"hf_assets_path is 'model'.*the run was started"):
        export_run(run, output=tmp_path / "hf")
    assert not list(tmp_path.glob("hf*"))


@pytest.mark.parametrize(
    ("section", "value", "told"),
    [
        ("job", 5, "job is 5; it must be an object"),
        ("model", {"name": []}, "model.name is []; it must be a text of one line"),
        ("checkpoint", {"folder": 7}, "checkpoint.folder is 7"),
        ("training", {"dtype": "odd"}, "training.dtype is 'odd'; it must be one of"),
        ("data", {"packing": "yes"}, "data.packing is 'yes'; it must be true or false"),
    ],
)
def test_settings_of_another_hand_are_refused_in_a_sentence(
    section: str, value: Any, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_folder(tmp_path / "model", FAMILIES["llama3"])
    run = save_run(tmp_path, load(source), hf_assets_path=str(source))
    settings = json.loads((run / "settings.json").read_text())
    (run / "settings.json").write_text(json.dumps({**settings, section: value}))
    assert main([str(run)]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("what", ["table", "shard"])
def test_a_damaged_checkpoint_is_told_without_torchs_advice(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_folder(tmp_path / "model", FAMILIES["llama3"])
    run = save_run(tmp_path, load(source), hf_assets_path=str(source))
    checkpoint = tmp_path / "outputs" / "checkpoint" / "step-10"
    if what == "table":
        table = read_contents(checkpoint)
        for entry in table.state_dict_metadata.values():
            entry.size = "odd"
        (checkpoint / METADATA).write_bytes(pickle.dumps(table))
    else:
        buffer = io.BytesIO()
        torch.save(Path("/"), buffer)
        (shard,) = checkpoint.glob("*.distcp")
        n_bytes = shard.stat().st_size
        first = min(read_contents(checkpoint).storage_data.values(), key=lambda at: at.offset)
        content = bytearray(shard.read_bytes())
        assert len(buffer.getvalue()) <= first.length
        content[: first.length] = buffer.getvalue().ljust(first.length, b"\0")
        shard.write_bytes(content)
        assert shard.stat().st_size == n_bytes
    assert main([str(run)]) == 2
    said = capsys.readouterr().err
    assert "step-10' is damaged: " in said
    assert "weights_only" not in said
    assert len(said) < 600
    assert not (run / "hf_step-10").exists()


def test_the_command_prints_the_folder_or_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_folder(tmp_path / "model", FAMILIES["llama3"])
    run = save_run(tmp_path, load(source), hf_assets_path=str(source))
    output = tmp_path / "exported"
    assert main([str(run), "10", "--output", str(output), "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(output)
    settings, weights = read_folder(output)
    assert settings["dtype"] == settings["torch_dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert main([str(run), "3"]) == 2
    assert "error: " in capsys.readouterr().err
