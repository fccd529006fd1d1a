"""Presets, from a file and a command line to the configuration; halves of a run with adapters."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.torchtitan.helpers.job_configs import config, put
from torchtitan.freezing.checks import ConfigError
from torchtitan.freezing.launch import read_config
from torchtitan.settings import (
    JobConfig,
    adapters_half,
    model_family,
    pipeline_metadata,
    pipeline_order,
    pipeline_title,
    preset_line,
    weights_half,
)

PAPER = '[freezing]\npreset = "paper"\n'


def read(path: Path, text: str, *arguments: str) -> JobConfig:
    path.write_text(text)
    return read_config([f"--job.config_file={path}", *arguments])


def value(job_config: JobConfig, key: str) -> Any:
    found: Any = job_config
    for name in key.split("."):
        found = getattr(found, name)
    return found


# What docs/method.md says of the paper, key by key.
FIXED = {
    "freezing.first_stage": "per_tensor",
    "freezing.skip_input_grads": "off",
    "freezing.monitoring": "halves",
    "freezing.replan_every": 0,
    "freezing.min_gain": -1.0,
    "freezing.apf.reduction": "share",
    "freezing.autofreeze.delta": "updates",
    "freezing.autofreeze.change": "signed",
    "report.count_padding": True,
}
OTHERS = {
    "freezing.first_stage": "all_or_nothing",
    "freezing.skip_input_grads": "use",
    "freezing.monitoring": "mixed",
    "freezing.replan_every": 100,
    "freezing.min_gain": 0.02,
    "freezing.apf.reduction": "elements",
    "freezing.autofreeze.delta": "gradients",
    "freezing.autofreeze.change": "absolute",
}
USUAL = {"freezing.max_freeze_ratio": 0.8, "freezing.autofreeze.percentile": 80.0}


def test_the_papers_values_are_set_and_told(tmp_path: Path) -> None:
    job_config = read(tmp_path / "a.toml", PAPER)
    told = preset_line(job_config)
    assert told is not None
    for key, wanted in {**FIXED, **USUAL}.items():
        assert value(job_config, key) == wanted
        assert f"{key} = {wanted!r}" in told
    assert told.startswith("freezing.preset = 'paper': ")


def test_without_one_nothing_is_set_or_told(tmp_path: Path) -> None:
    job_config = read(tmp_path / "a.toml", "")
    assert preset_line(job_config) is None
    empty = read(tmp_path / "a.toml", '[freezing]\npreset = ""\n')
    assert job_config.to_dict() == empty.to_dict()
    assert job_config.freezing.max_freeze_ratio == "auto"


def test_keys_that_contradict_are_refused_wherever_they_stand(tmp_path: Path) -> None:
    told = [
        f"{key} is {other!r}, and freezing.preset 'paper' stands for {FIXED[key]!r}; remove one "
        "of the two"
        for key, other in OTHERS.items()
    ]
    written = "".join(f"{key} = {json.dumps(other)}\n" for key, other in OTHERS.items())
    arguments = [f"--{key.replace('_', '-')}={other}" for key, other in OTHERS.items()]
    padding = "report.count_padding is False, and freezing.preset 'paper' stands for True"
    for text, words in (
        (written, ["--freezing.preset=paper"]),
        (PAPER, [*arguments, "--report.no_count_padding"]),
    ):
        with pytest.raises(ConfigError) as error:
            read(tmp_path / "a.toml", text, *words)
        lines = str(error.value).splitlines()
        assert [f"  - {line}" for line in told] == lines[1 : len(told) + 1]
        assert all(padding in line for line in lines[len(told) + 1 :])
        assert len(lines) == 1 + len(told) + (text is PAPER)


def test_keys_that_agree_are_no_error(tmp_path: Path) -> None:
    given = [f"--{key}" if wanted is True else f"--{key}={wanted}" for key, wanted in FIXED.items()]
    job_config = read(tmp_path / "a.toml", PAPER, *given)
    assert {key: value(job_config, key) for key in FIXED} == FIXED


def test_what_the_paper_leaves_to_the_user_may_be_given(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    job_config = read(
        path, PAPER + "max_freeze_ratio = 0.5\n", "--freezing.autofreeze.percentile=70"
    )
    assert job_config.freezing.max_freeze_ratio == 0.5
    assert job_config.freezing.autofreeze.percentile == 70.0
    with pytest.raises(ConfigError, match=r'max_freeze_ratio is "auto", which the preset'):
        read(path, PAPER + 'max_freeze_ratio = "auto"\n')


def test_an_unknown_preset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"freezing\.preset is 'papers'; known: paper"):
        read(tmp_path / "a.toml", "", "--freezing.preset=papers")


@pytest.mark.parametrize(
    ("name", "unit", "per_microbatch", "title"),
    [
        ("llama3", "tokens", 2 * 64, "4 microbatches of 2 x 64 tokens, weights float32"),
        ("vit", "images", 2, "4 microbatches of 2 images, weights float32"),
        ("convnextv2", "images", 2, "4 microbatches of 2 images, weights float32"),
    ],
)
def test_a_row_is_its_tokens_or_one_picture(
    name: str, unit: str, per_microbatch: int, title: str
) -> None:
    given = config(
        model__name=name,
        training__seq_len=64,
        parallelism__pipeline_parallel_microbatch_size=2,
    )
    assert model_family(given).unit == unit
    order = pipeline_order(given, 8)
    notes = pipeline_metadata(given, order, 8)
    assert (notes.tokens_per_microbatch, notes.unit) == (per_microbatch, unit)
    assert title in pipeline_title(given)


@pytest.mark.parametrize(("rank", "mode"), [(0, "all_or_nothing"), (8, "per_tensor")])
def test_notes_say_how_the_first_stage_was_frozen(rank: int, mode: str) -> None:
    """Gradients of a rank keep its chain, whatever the key says; who plans from the notes must."""
    given = config(freezing__gradient_rank=rank)
    notes = pipeline_metadata(given, pipeline_order(given, 8), 8)
    assert (notes.first_stage, notes.gradient_rank) == (mode, rank)


def test_adapters_learn_alone_and_phases_begin_behind_them() -> None:
    excluded = ["freezing", "dataloader"]
    whole = config(lora__until=48, checkpoint__exclude_from_loading=excluded)
    put(whole, "freezing", last_warmup_step=60, last_monitor_step=100, last_ramp_step=200)
    first, second = adapters_half(whole), weights_half(whole)
    assert (first.freezing.method, second.freezing.method) == ("lora", "timelyfreeze")
    assert (first.lora.until, second.lora.until, whole.lora.until) == (0, 0, 48)
    assert first.checkpoint.exclude_from_loading == ["dataloader"]
    assert second.checkpoint.exclude_from_loading == excluded
    ends = second.freezing
    assert (ends.last_warmup_step, ends.last_monitor_step, ends.last_ramp_step) == (108, 148, 248)
    assert first.training == second.training == whole.training


def test_steps_of_a_policy_are_counted_from_there_too() -> None:
    whole = config(lora__until=48, freezing__method="egeria")
    whole.freezing.egeria.unfreeze_steps.append(300)
    assert weights_half(whole).freezing.egeria.unfreeze_steps == [348]
    assert whole.freezing.egeria.unfreeze_steps == [300]
