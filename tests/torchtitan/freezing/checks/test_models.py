"""Errors about models and their weights, found from the configuration and the folder alone."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.models.llama3 import llama3_args
from torchtitan.protocols.train_spec import get_train_spec

from tests.torchtitan.helpers.hf_models import FAMILIES, write_folder
from tests.torchtitan.helpers.job_configs import config
from torchtitan.freezing.checks import ConfigError, check, models
from torchtitan.freezing.checks.features import DEVICE
from torchtitan.freezing.checks.models import model_errors
from torchtitan.freezing.checks.requirements import feature_errors
from torchtitan.hf.flavors import LLAMA_FLAVORS, chosen_args, known_flavors
from torchtitan.hf.llama_config import feed_forward_size, read_config
from torchtitan.settings.job_config import JobConfig, job_config_class

# It comes with lm-eval (`scripts/setup.sh eval`); flux's own code imports it too.
needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)


def hf_config(folder: Path | str = "", **changes: Any) -> JobConfig:
    job_config = job_config_class()()
    values = {
        "model__name": "llama3",
        "model__flavor": "hf",
        "model__hf_assets_path": str(folder),
        "training__seq_len": 64,
        "checkpoint__enable": True,
        "checkpoint__initial_load_in_hf": True,
        "job__dump_folder": str(Path(folder) / "outputs"),
        **changes,
    }
    for key, value in values.items():
        section, name = key.split("__")
        assert hasattr(getattr(job_config, section), name), key
        setattr(getattr(job_config, section), name, value)
    return job_config


def the_error(job_config: JobConfig) -> str:
    (error,) = model_errors(job_config)
    return error


def claim(folder: Path, **changes: Any) -> Path:
    """Let ``config.json`` say something else."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_folder_is_loaded_with_the_flavor_it_describes(tmp_path: Path, family: str) -> None:
    folder = write_folder(tmp_path, FAMILIES[family], n_files=2)
    job_config = hf_config(folder)
    check(job_config)
    args = chosen_args(job_config, llama3_args)
    assert feed_forward_size(args) == FAMILIES[family]["intermediate_size"]
    assert args.n_kv_heads == FAMILIES[family]["num_key_value_heads"]


def test_the_folder_of_initial_load_path_comes_first(tmp_path: Path) -> None:
    weights = write_folder(tmp_path / "weights", FAMILIES["llama3"])
    tokenizer = write_folder(tmp_path / "tokenizer", FAMILIES["smollm2"])
    job_config = hf_config(tokenizer, checkpoint__initial_load_path=str(weights))
    assert list(model_errors(job_config)) == []
    assert chosen_args(job_config, llama3_args).dim == 64
    job_config = hf_config(
        tokenizer,
        checkpoint__initial_load_path=str(weights),
        checkpoint__initial_load_in_hf=False,
    )
    assert chosen_args(job_config, llama3_args).dim == 48, "that path then is a checkpoint"


def test_each_difference_from_the_flavor_is_listed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, FAMILIES["smollm2"])
    error = the_error(hf_config(folder, model__flavor="SmolLM2-135M"))
    for words in (
        "hidden_size is 48, not 576",
        "intermediate_size is 128, not 1536",
        "num_hidden_layers is 6, not 30",
        "num_attention_heads is 3, not 9",
        "num_key_value_heads is 1, not 3",
        "vocab_size is 2048, not 49152",
        "model.flavor 'SmolLM2-135M'",
        repr(str(folder)),
        'model.flavor = "hf"',
    ):
        assert words in error
    assert "rope_theta" not in error
    with pytest.raises(ConfigError, match="hidden_size is 48"):
        check(hf_config(folder, model__flavor="SmolLM2-135M"))


def test_upstreams_scaling_by_8_does_not_pass_for_llama_3(tmp_path: Path) -> None:
    """Only the RoPE tells Llama 3 from 3.1: the weights would load and the logits be wrong."""
    folder = write_folder(tmp_path, FAMILIES["llama3"])
    error = the_error(hf_config(folder, model__rope_scaling_factor=8.0))
    assert (
        "rope_scaling is none, not {'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0"
        in error
    )


def test_another_vocabulary_is_a_difference(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, FAMILIES["llama3"])
    assert "vocab_size is 2048, not 2050" in the_error(hf_config(folder, model__vocab_size=2050))


def test_weights_are_not_looked_at_unless_they_are_loaded(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, FAMILIES["smollm2"])
    job_config = hf_config(folder, model__flavor="Llama-2-7B", checkpoint__initial_load_in_hf=False)
    assert list(model_errors(job_config)) == []


def test_the_flavor_hf_needs_a_model_it_can_read(tmp_path: Path) -> None:
    assert "has no config.json" in the_error(hf_config(tmp_path))
    folder = claim(write_folder(tmp_path / "other", FAMILIES["llama3"]), model_type="gemma3")
    for loads in (True, False):
        error = the_error(hf_config(folder, checkpoint__initial_load_in_hf=loads))
        assert 'model.flavor is "hf"' in error
        assert "model_type is 'gemma3'; known: llama, mistral, qwen2, qwen3" in error


def test_sequences_have_no_more_tokens_than_the_model_has_positions(tmp_path: Path) -> None:
    folder = claim(write_folder(tmp_path, FAMILIES["llama3"]), max_position_embeddings=128)
    assert list(model_errors(hf_config(folder, training__seq_len=128))) == []
    error = the_error(hf_config(folder, training__seq_len=129))
    assert error.startswith("training.seq_len is 129, and model.flavor 'hf' has 128 positions")


def test_sequences_are_no_longer_than_a_sliding_window(tmp_path: Path) -> None:
    folder = claim(write_folder(tmp_path, FAMILIES["mistral"]), sliding_window=128)
    assert list(model_errors(hf_config(folder, training__seq_len=128))) == []
    error = the_error(hf_config(folder, training__seq_len=129))
    assert error.startswith("training.seq_len is 129, and the model in")
    assert "has a sliding_window of 128" in error


def test_norms_of_heads_are_not_split_over_ranks(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "qwen3", FAMILIES["qwen3"])
    error = the_error(hf_config(folder, parallelism__tensor_parallel_degree=2))
    assert error.startswith("parallelism.tensor_parallel_degree is 2, and the model norms its")
    other = write_folder(tmp_path / "qwen2", FAMILIES["qwen2"])
    assert list(model_errors(hf_config(other, parallelism__tensor_parallel_degree=2))) == []


def test_an_unfinished_checkpoint_does_not_pass_for_weights(tmp_path: Path) -> None:
    """The run begins with the folder's weights then, so these have to be there."""
    step = tmp_path / "outputs" / "checkpoint" / "step-10"
    step.mkdir(parents=True)
    assert "has no config.json" in the_error(hf_config(tmp_path))
    folder = write_folder(tmp_path, FAMILIES["llama3"])
    assert list(model_errors(hf_config(folder))) == []


def test_a_run_that_resumes_does_not_need_the_weights(tmp_path: Path) -> None:
    job_config = hf_config(tmp_path, model__flavor="8M")
    assert "has no config.json" in the_error(job_config)
    step = tmp_path / "outputs" / "checkpoint" / "step-10"
    step.mkdir(parents=True)
    (step / ".metadata").touch()
    assert list(model_errors(job_config)) == []


def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, FAMILIES["llama3"], n_files=2)
    (folder / "model-00001-of-00002.safetensors").unlink()
    assert "lacks model-00001-of-00002.safetensors" in the_error(hf_config(folder))


def test_weights_must_be_what_the_configuration_says(tmp_path: Path) -> None:
    folder = claim(write_folder(tmp_path, FAMILIES["llama3"]), num_hidden_layers=7)
    assert "it lacks model.layers.6.self_attn.q_proj.weight" in the_error(hf_config(folder))
    claim(folder, num_hidden_layers=5)
    assert "for which the model has no place" in the_error(hf_config(folder))


@pytest.mark.parametrize("flavor", LLAMA_FLAVORS)
def test_a_flavor_by_name_is_known(flavor: str) -> None:
    job_config = hf_config(model__flavor=flavor, checkpoint__initial_load_in_hf=False)
    args = chosen_args(job_config, llama3_args)
    assert args.vocab_size == LLAMA_FLAVORS[flavor].vocab_size
    assert flavor in known_flavors(job_config, llama3_args)


def test_an_unknown_flavor_is_refused_with_those_there_are() -> None:
    job_config = hf_config(model__flavor="Llama-9", checkpoint__initial_load_in_hf=False)
    with pytest.raises(ValueError, match=r"model\.flavor is 'Llama-9'") as error:
        chosen_args(job_config, llama3_args)
    assert "Llama-3.2-1B" in str(error.value)
    assert str(error.value).endswith(", hf")


def test_a_caller_gets_a_description_of_its_own() -> None:
    """Trainers write the sequence length into it."""
    job_config = hf_config(model__flavor="8M", checkpoint__initial_load_in_hf=False)
    chosen_args(job_config, llama3_args).max_seq_len = 7
    assert chosen_args(job_config, llama3_args).max_seq_len != 7


@needs_transformers
def test_models_that_transformers_builds_need_a_release_that_upstream_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Upstream reads fields of their configuration that later releases do not have."""
    name = "transformers_modeling_backend"
    job_config = hf_config(model__name=name, model__flavor="debugmodel", checkpoint__enable=False)
    monkeypatch.setattr(models, "version", lambda package: "5.23.0")
    error = the_error(job_config)
    assert error.startswith(f"model.name is {name!r}, and transformers 5.23.0 is installed")
    assert error.endswith("install 'transformers<5'")
    monkeypatch.setattr(models, "version", lambda package: "4.57.1")
    assert list(model_errors(job_config)) == []


@needs_transformers
def test_they_are_described_to_each_caller_anew() -> None:
    """transformers' configurations are no dataclasses that ``replace`` could copy."""
    name = "transformers_modeling_backend"
    flavors = get_train_spec(name).model_args
    job_config = hf_config(model__name=name, model__flavor="debugmodel", model__vocab_size=99)
    args = chosen_args(job_config, flavors)
    assert (args.n_layers, args.vocab_size) == (flavors["debugmodel"].n_layers, 99)
    args.n_layers = 7
    assert chosen_args(job_config, flavors).n_layers == 2
    assert not DEVICE.is_on(job_config)


@pytest.mark.parametrize("key", ["model__hf_assets_path", "checkpoint__initial_load_path"])
def test_a_tied_model_of_another_kind_is_refused(key: str, tmp_path: Path) -> None:
    """Without the refusal, upstream fails on a missing output layer once all processes run."""
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    loading = {"model__name": "qwen3", "model__flavor": "0.6B", key: str(tmp_path)}
    error = the_error(hf_config("elsewhere", **loading))
    assert repr(str(tmp_path)) in error
    assert "tie_word_embeddings = false" in error
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    assert list(model_errors(hf_config("elsewhere", **loading))) == []
    (tmp_path / "config.json").unlink()
    assert list(model_errors(hf_config("elsewhere", **loading))) == []


def test_a_tied_llama_is_not_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, FAMILIES["llama32"], dtype=torch.bfloat16)
    assert read_config(folder).tie_word_embeddings
    assert list(model_errors(hf_config(folder))) == []


@pytest.mark.parametrize(
    ("name", "flavor"),
    [
        ("qwen3", "debugmodel"),
        ("gpt_oss", "debugmodel"),
        pytest.param("flux", "flux-debug", marks=needs_transformers),
        ("vlm", "debugmodel"),
    ],
)
def test_a_model_that_upstream_cannot_cut_has_no_pipeline(name: str, flavor: str) -> None:
    assert get_train_spec(name).pipelining_fn is None
    (error,) = model_errors(config(model__name=name, model__flavor=flavor))
    assert f"model.name is {name!r} and parallelism.pipeline_parallel_degree is 4" in error
    assert "the degree must be 1" in error
    alone = {"parallelism__pipeline_parallel_degree": 1}
    assert list(model_errors(config(model__name=name, model__flavor=flavor, **alone))) == []
    (error,) = model_errors(config(model__name=name, model__flavor="none of theirs"))
    assert f"model.flavor is 'none of theirs', which {name} does not have; known: " in error


@pytest.mark.parametrize("name", ["llama3", "llama4", "deepseek_v3", "llama3_ft"])
def test_a_model_that_upstream_cuts_may_have_a_pipeline(name: str) -> None:
    changes = {"parallelism__pipeline_parallel_degree": 2, "model__name": name}
    assert list(model_errors(config(**changes, model__flavor="debugmodel"))) == []


def test_an_unknown_model_and_one_that_cannot_be_imported_are_named() -> None:
    (error,) = model_errors(config(model__name="lama3"))
    assert "model.name is 'lama3'; known: autoparallel" in error
    assert 'is model.name = "llama3", model.flavor = "hf" and model.hf_assets_path its' in error
    (error,) = model_errors(config(model__name="autoparallel.llama3"))
    assert "model.name is 'autoparallel.llama3', which cannot be imported" in error


@pytest.mark.parametrize(
    ("name", "flavor", "has_experts"),
    [
        ("deepseek_v3", "debugmodel", True),
        ("llama4", "debugmodel", True),
        ("qwen3", "debugmodel_moe", True),
        ("qwen3", "debugmodel", False),
        ("llama3", "8M", False),
    ],
)
def test_experts_need_an_accelerator(
    name: str, flavor: str, has_experts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = config(model__name=name, model__flavor=flavor)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    errors = list(feature_errors(asked, (DEVICE,)))
    assert len(errors) == has_experts
    lacks = f"model.flavor is {flavor!r}, and this machine has no accelerator; torch counts the "
    assert all(error.startswith(lacks) for error in errors)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert list(feature_errors(asked, (DEVICE,))) == []


def test_torch_still_cannot_count_the_tokens_of_experts_on_a_cpu() -> None:
    with pytest.raises(NotImplementedError, match="histogram_cpu"):
        torch.histc(torch.zeros(4, dtype=torch.int64), bins=2, min=0, max=2)
