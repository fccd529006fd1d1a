"""Which parts of the train spec are upstream's and which are ours."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torchtitan.tools.utils as titan_tools
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec

from torchtitan.data.sources import ExampleSplit
from torchtitan.data.text.tokenizer import FolderTokenizer
from torchtitan.data.validation import InstructValidator
from torchtitan.freezing.spec import build_train_spec, loading_of
from torchtitan.hf.decoder import Decoder
from torchtitan.settings import with_values
from torchtitan.settings.job_config import JobConfig

ASSETS = Path(__file__).parents[2] / "assets"
TOKENIZER = FolderTokenizer(str(ASSETS / "tokenizer"))


def job_config(**changes: Any) -> JobConfig:
    config = JobConfig()
    config.model.name, config.model.flavor = "llama3", "8M"
    for section in (config.training, config.validation):
        section.dataset = "alpaca"
        section.dataset_path = str(ASSETS / "tiny_instruct")
        section.seq_len, section.local_batch_size = 128, 4
    config.data.validation_fraction = 0.1
    for key, value in changes.items():
        section, name = key.split("__")
        setattr(getattr(config, section), name, value)
    return config


def validator(spec: TrainSpec, config: JobConfig) -> Any:
    return spec.build_validator_fn(
        job_config=config,
        dp_world_size=1,
        dp_rank=0,
        tokenizer=TOKENIZER,
        parallel_dims=SimpleNamespace(dp_enabled=False),
        loss_fn=None,
        validation_context=None,
        maybe_enable_amp=None,
        metrics_processor=None,
    )


def test_validation_reads_the_examples_that_the_training_loader_leaves_out() -> None:
    config = job_config()
    spec = build_train_spec(get_train_spec("llama3"), config)
    built = validator(spec, config)
    assert isinstance(built, InstructValidator)
    assert built._loader.dataset.split == ExampleSplit(0.1, held_out=True)
    trained = spec.build_dataloader_fn(
        dp_world_size=1, dp_rank=0, tokenizer=TOKENIZER, job_config=config
    )
    assert trained.dataset.split == ExampleSplit(0.1)


def test_packing_and_templates_are_for_training_and_validation() -> None:
    config = job_config(data__packing=True, data__chat_template="alpaca")
    upstream = get_train_spec("llama3")
    spec = build_train_spec(upstream, config)
    assert spec.model_cls is Decoder
    place = {"dp_world_size": 1, "dp_rank": 0}
    training = spec.build_dataloader_fn(**place, tokenizer=TOKENIZER, job_config=config)
    for loader in (training, validator(spec, config)._loader):
        inputs, _ = next(iter(loader))
        assert "positions" in inputs
        text = TOKENIZER.decode(inputs["input"][0].tolist(), skip_special_tokens=False)
        assert text.startswith("<|begin|>Below is an instruction")
    text = job_config(training__dataset="c4_test")
    assert build_train_spec(upstream, text).model_cls is Decoder
    flex = job_config(training__dataset="c4_test", model__flavor="debugmodel_flex_attn")
    assert build_train_spec(upstream, flex).model_cls is upstream.model_cls


def test_a_flavor_that_cannot_read_packed_sequences_is_refused() -> None:
    config = job_config(data__packing=True, model__flavor="debugmodel_flex_attn")
    with pytest.raises(
        ValueError, match=r"model\.flavor 'debugmodel_flex_attn' has attn_type 'flex'"
    ):
        build_train_spec(get_train_spec("llama3"), config)


@pytest.mark.parametrize("flavor", ["debugmodel_flex_attn", "debugmodel_varlen_attn"])
def test_a_flavor_that_would_cut_conversations_at_their_turns_is_refused(flavor: str) -> None:
    """One answer ends where its example ends, so alpaca's examples are not cut."""
    settings = {"model__flavor": flavor, "validation__enable": False}
    upstream = get_train_spec("llama3")
    with pytest.raises(ValueError, match=rf"conversations, and model\.flavor '{flavor}'"):
        build_train_spec(upstream, job_config(training__dataset="ShareGPT", **settings))
    build_train_spec(upstream, job_config(training__dataset="alpaca", **settings))
    build_train_spec(upstream, job_config(training__dataset="sharegpt"))


def test_text_is_validated_as_upstream_does() -> None:
    config = job_config(validation__dataset="c4_test", data__validation_fraction=0.0)
    asked = []

    def build_validator(**kwargs: Any) -> str:
        asked.append(kwargs["job_config"])
        return "upstream's"

    upstream = replace(get_train_spec("llama3"), build_validator_fn=build_validator)
    assert validator(build_train_spec(upstream, config), config) == "upstream's"
    assert asked == [config]


@pytest.mark.slow
def test_validating_on_rows_that_are_trained_on_is_said(caplog: pytest.LogCaptureFixture) -> None:
    text = "Validation reads the examples that are trained on"
    config = job_config(data__validation_fraction=0.0)
    spec = build_train_spec(get_train_spec("llama3"), config)
    assert validator(spec, config)._loader.dataset.split == ExampleSplit()
    assert text in caplog.text
    caplog.clear()
    validator(spec, job_config())
    assert text not in caplog.text


def test_a_model_that_upstream_cannot_validate_stays_so() -> None:
    upstream = replace(get_train_spec("llama3"), build_validator_fn=None)
    assert build_train_spec(upstream, job_config()).build_validator_fn is None


_CACHE = {"freezing.cache.enable": True, "freezing.method": "fixed"}


@pytest.mark.parametrize(
    ("device", "values", "workers", "pinned", "ahead"),
    [
        ("cpu", {}, 0, False, 2),
        ("cuda", {}, 1, True, 2),
        ("cuda", {"training.dataloader.num_workers": 0}, 0, True, 2),
        ("cuda", {"training.dataloader.num_workers": 3}, 3, True, 2),
        ("cpu", {"training.dataloader.num_workers": 1}, 1, False, 2),
        ("cuda", {"training.dataset": "c4_test"}, 0, True, 2),
        ("cuda", {"training.dataset": "images"}, 0, True, 2),
        ("cuda", _CACHE, 0, True, 2),
        ("cuda", {"training.global_batch_size": 48}, 1, True, 6),  # 2 replicas of 4 sequences
        ("cuda", {"training.dataloader.prefetch_factor": 9}, 1, True, 9),
        ("cpu", {"training.dataloader.pin_memory": True}, 0, True, 2),
    ],
)
def test_on_gpus_a_worker_makes_the_batches_of_the_next_step(
    device: str,
    values: dict[str, Any],
    workers: int,
    pinned: bool,
    ahead: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(titan_tools, "device_type", device)
    loading = loading_of(with_values(job_config(), values), dp_world_size=2)
    found = (loading.num_workers, loading.pin_memory, loading.prefetch_factor)
    assert found == (workers, pinned, ahead)


def test_the_loader_is_built_as_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(titan_tools, "device_type", "cuda")
    config = job_config()
    spec = build_train_spec(get_train_spec("llama3"), config)
    built = spec.build_dataloader_fn(
        dp_world_size=1, dp_rank=0, tokenizer=TOKENIZER, job_config=config
    )
    assert (built.num_workers, built.pin_memory, built.prefetch_factor) == (1, True, 2)
    assert config.training.dataloader.num_workers == -1  # a resumed run may have another device
