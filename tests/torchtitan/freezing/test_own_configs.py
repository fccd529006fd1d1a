"""Configurations of our own for the paper's language models: what their heads say is so."""

import re
import tomllib
from pathlib import Path

import pytest

from torchtitan.freezing.checks import check, validation_split
from torchtitan.freezing.launch import read_config
from torchtitan.freezing.memory.estimate import estimate_memory
from torchtitan.freezing.values.pipeline import n_microbatches
from torchtitan.settings import JobConfig

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[3] / "train_configs"
# Each with the devices that it is written for, the other ones, and their memory that torch can use.
MODELS = {
    "llama3_2_1b": ("A6000", "H200"),
    "llama3_8b": ("H200", "A6000"),
    "llama2_13b": ("H200", "A6000"),
}
GIB = {"A6000": 44.7, "H200": 131.0}
WITHOUT_WEIGHTS = "--checkpoint.no_initial_load_in_hf"


def head_of(name: str) -> str:
    text = (FOLDER / f"{name}.toml").read_text()
    return text[: text.index("\n\n")]


def keys_for_others(name: str) -> list[str]:
    """The keys that the line of the hardware and those below it give."""
    (hardware,) = re.findall(r"^# Hardware: .*\n((?:# +--.*\n)+)", head_of(name), re.M)
    return re.findall(r"--\S+", hardware)


def parse(name: str, *arguments: str) -> JobConfig:
    return read_config([f"--job.config_file={FOLDER / f'{name}.toml'}", *arguments])


@pytest.mark.parametrize("name", MODELS)
def test_they_are_packed_by_the_default_method_and_held_out_rows_are_read(name: str) -> None:
    config = parse(name)
    assert config.data.packing
    freezing = config.freezing
    assert (freezing.method, freezing.preset) == ("timelyfreeze", "")
    assert (freezing.max_freeze_ratio, freezing.gradient_ranks) == ("auto", (16, 32, 64))
    assert config.validation.enable
    assert validation_split(config).held_out
    assert config.lr_scheduler.warmup_steps == freezing.last_warmup_step
    assert freezing.last_ramp_step < config.training.steps / 4
    assert config.checkpoint.enable
    assert config.checkpoint.initial_load_in_hf
    parallelism = tomllib.loads((FOLDER / f"{name}.toml").read_text())["parallelism"]
    assert not any("less_layers" in key or "module_fqns" in key for key in parallelism)


@pytest.mark.parametrize("name", MODELS)
def test_each_hardware_of_the_head_holds_every_rank(name: str) -> None:
    for device, keys in zip(MODELS[name], ([], keys_for_others(name)), strict=True):
        config = parse(name, WITHOUT_WEIGHTS, *keys)
        check(config)
        ranks = estimate_memory(config)
        assert len(ranks) == 4
        assert all(rank.fits(GIB[device] * 1024**3) for rank in ranks), device


@pytest.mark.parametrize("name", MODELS)
def test_the_head_says_what_a_step_has(name: str) -> None:
    config, (device, other), head = parse(name), MODELS[name], head_of(name)
    training = config.training
    n = n_microbatches(config)
    size = training.local_batch_size // n
    batch = f"{training.local_batch_size} sequences on the pipeline = {n} microbatches of {size}; "
    assert batch in head
    tokens = f"{training.global_batch_size * training.seq_len:,}"
    assert f"{training.global_batch_size} a step = {tokens} tokens" in head
    assert f"{training.steps:,} steps = " in head
    assert re.search(rf"^# Hardware:  4 x {device} .*4 x {other} ", head, re.M)
    devices = " ".join(f"{gib:g}" for gib in GIB.values())
    assert f"timelyfreeze estimate train_configs/{name}.toml --device-gib {devices} " in head
    assert f"CONFIG_FILE=train_configs/{name}.toml NGPU=4 ./run_train.sh" in head
    assert "not measured on real weights" in head
    assert f"paper_{name}.toml" in head
    # A step is the same on both kinds of devices.
    assert parse(name, *keys_for_others(name)).training.global_batch_size == (
        training.global_batch_size
    )
