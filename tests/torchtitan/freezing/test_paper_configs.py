"""The configurations of the paper's language models, against its Table 3."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchtitan.protocols.train_spec import get_train_spec

from timelyfreeze.policies import Check
from timelyfreeze.policies.layout import build_layout
from timelyfreeze.runtime.meters.change_meter import ChangeMeter
from torchtitan.freezing.checks import check
from torchtitan.freezing.launch import read_config
from torchtitan.freezing.memory.estimate import estimate_memory
from torchtitan.freezing.spec import build_train_spec
from torchtitan.freezing.values.pipeline import n_microbatches
from torchtitan.settings import JobConfig

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[3] / "train_configs"
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")
METHODS = ("none", "apf", "autofreeze", "timelyfreeze+apf", "timelyfreeze+autofreeze")


@dataclass(frozen=True)
class Column:
    """A column of Table 3, and the published sizes of its model."""

    model: str
    dataset: str
    hardware: str
    steps: int
    warmup: int
    lr: float
    global_batch: int
    phases: tuple[int, int, int]
    apf_threshold: float
    n_layers: int
    dim: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    vocab: int
    # Average accuracy before, and under 1F1B without and with freezing; from Tables 1, 4 and 5.
    accuracies: tuple[float, float, float]
    gain: float
    device_gib: float

    @property
    def n_parameters(self) -> int:
        """With an output layer of its own, as stages have it."""
        kv = self.dim // self.n_heads * self.n_kv_heads
        attention = 2 * self.dim * self.dim + 2 * self.dim * kv
        layer = attention + 3 * self.dim * self.hidden + 2 * self.dim
        return self.n_layers * layer + 2 * self.vocab * self.dim + self.dim


COLUMNS = {
    "paper_llama3_2_1b": Column(
        "Llama-3.2-1B", "alpaca", "4 x A6000", 800, 100, 5e-6, 128, (60, 100, 200), 0.01,
        16, 2048, 8192, 32, 8, 128256, (34.93, 35.91, 36.36), 29.4, 44.7,
    ),
    "paper_llama3_8b": Column(
        "Llama-3-8B", "sharegpt", "4 x H200", 2000, 200, 3e-6, 64, (160, 200, 250), 0.0001,
        32, 4096, 14336, 32, 8, 128256, (50.81, 54.63, 54.69), 36.9, 131,
    ),
    "paper_llama2_13b": Column(
        "Llama-2-13B", "sharegpt", "4 x H200", 2000, 200, 3e-6, 64, (150, 200, 250), 0.0001,
        40, 5120, 13824, 40, 40, 32000, (46.73, 51.15, 51.06), 42.7, 131,
    ),
}  # fmt: skip

ONE, *OTHERS = COLUMNS

# Weights are not in the repository.
WITHOUT_WEIGHTS = "--checkpoint.no_initial_load_in_hf"


def parse(name: str, *arguments: str) -> JobConfig:
    path = FOLDER / f"{name}.toml"
    return read_config([f"--job.config_file={path}", *arguments])


def test_the_published_sizes_are_those_of_the_models() -> None:
    """Parameters as the models' authors give them; the 1B ties its embedding."""
    sizes = {name: column.n_parameters for name, column in COLUMNS.items()}
    assert sizes["paper_llama3_2_1b"] - 128256 * 2048 == 1_235_814_400
    assert sizes["paper_llama3_8b"] == 8_030_261_248
    assert sizes["paper_llama2_13b"] == 13_015_864_320


@pytest.mark.parametrize("name", COLUMNS)
def test_values_are_those_of_table_3(name: str) -> None:
    column, config = COLUMNS[name], parse(name)
    training, freezing, pipeline = config.training, config.freezing, config.parallelism
    assert (training.dataset, training.dataset_path) == (column.dataset, None)
    assert (training.steps, training.seq_len) == (column.steps, 1024)
    assert (training.local_batch_size, training.global_batch_size) == (16, column.global_batch)
    assert (config.optimizer.name, config.optimizer.lr) == ("AdamW", column.lr)
    scheduler = config.lr_scheduler
    assert (scheduler.warmup_steps, scheduler.decay_type) == (column.warmup, "cosine")
    assert (scheduler.decay_ratio, scheduler.min_lr_factor) == (None, 0.0)
    assert pipeline.pipeline_parallel_degree == 4
    assert n_microbatches(config) == 8
    assert freezing.method == "timelyfreeze"
    assert (
        freezing.last_warmup_step, freezing.last_monitor_step, freezing.last_ramp_step,
    ) == column.phases  # fmt: skip
    assert (freezing.preset, freezing.max_freeze_ratio) == ("paper", 0.8)
    assert freezing.apf.reduction == "share", "thresholds of single elements"
    assert (freezing.apf.threshold, freezing.autofreeze.percentile) == (column.apf_threshold, 80.0)
    # An epoch of OpenHermes-2.5 is longer than the run.
    assert freezing.autofreeze.checks_per_epoch == (5 if column.dataset == "alpaca" else 0)
    assert config.debug.seed == 42
    # Weights come from the folder, are kept in float32 and saved at the end.
    checkpoint = config.checkpoint
    assert checkpoint.enable
    assert checkpoint.initial_load_in_hf
    assert 4 * checkpoint.interval == column.steps
    assert (training.dtype, training.mixed_precision_param) == ("float32", "bfloat16")


@pytest.mark.parametrize("name", [ONE, *(pytest.param(n, marks=pytest.mark.long) for n in OTHERS)])
@pytest.mark.parametrize(
    ("schedule", "method"),
    [*((schedule, "timelyfreeze") for schedule in SCHEDULES), *(("1F1B", m) for m in METHODS)],
)
def test_schedule_and_method_go_by_flag(name: str, schedule: str, method: str) -> None:
    config = parse(
        name,
        f"--parallelism.pipeline_parallel_schedule={schedule}",
        f"--freezing.method={method}",
        WITHOUT_WEIGHTS,
    )
    assert config.parallelism.pipeline_parallel_schedule == schedule
    assert config.freezing.method == method
    check(config)


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_rank_fits_the_papers_devices(name: str, schedule: str) -> None:
    column = COLUMNS[name]
    config = parse(name, f"--parallelism.pipeline_parallel_schedule={schedule}", WITHOUT_WEIGHTS)
    ranks = estimate_memory(config)
    assert len(ranks) == 4
    # Weights, gradients and two moments, 4 bytes each, however the stages are cut.
    static = sum(rank.parameters + rank.gradients + rank.optimizer for rank in ranks)
    assert static == 16 * column.n_parameters
    assert all(rank.fits(column.device_gib * 1024**3) for rank in ranks)


def test_13b_does_not_fit_the_small_devices() -> None:
    ranks = estimate_memory(parse("paper_llama2_13b", WITHOUT_WEIGHTS))
    assert not any(rank.fits(48 * 1024**3) for rank in ranks)


@pytest.mark.parametrize("name", COLUMNS)
def test_the_model_builds_with_its_published_size(name: str) -> None:
    column, config = COLUMNS[name], parse(name, WITHOUT_WEIGHTS)
    spec = build_train_spec(get_train_spec(config.model.name), config)
    model_args: Any = spec.model_args[config.model.flavor]
    model_args.update_from_config(config)
    with torch.device("meta"):
        model = spec.model_cls(model_args)
    assert sum(parameter.numel() for parameter in model.parameters()) == column.n_parameters
    assert (model_args.n_layers, model_args.dim, model_args.vocab_size) == (
        column.n_layers, column.dim, column.vocab,
    )  # fmt: skip


@pytest.mark.parametrize("name", COLUMNS)
def test_a_file_opens_with_command_hardware_and_the_papers_metrics(name: str) -> None:
    column, text = COLUMNS[name], (FOLDER / f"{name}.toml").read_text()
    lines = text[: text.index("\n\n")].splitlines()
    assert all(line.startswith("#") for line in lines)
    head = "\n".join(lines)
    assert head.startswith(f"# {column.model} fine-tuned on ")
    assert f"CONFIG_FILE=train_configs/{name}.toml NGPU=4 ./run_train.sh" in head
    assert re.search(rf"^# Hardware:  {column.hardware} ", head, re.M)
    n_batches = column.global_batch // 16
    assert f"{column.global_batch} rows a step = {n_batches} pipeline batches" in head
    assert "the paper's metrics, not ours" in head
    before, none, frozen = column.accuracies
    assert f"({before:.2f} before)" in head
    (row,) = re.findall(r"^# +1F1B +(.*)$", head, re.M)
    assert row.startswith(f"{none:.2f}, ")
    assert f" {frozen:.2f}, " in row
    assert f"(+{column.gain}%)" in row


@pytest.mark.parametrize("name", COLUMNS)
def test_what_the_table_gives_is_told_in_the_file_and_not_left_to_defaults(name: str) -> None:
    written = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    for key in ("steps", "seq_len", "local_batch_size", "global_batch_size"):
        assert key in written["training"]
    for key in ("last_warmup_step", "last_monitor_step", "last_ramp_step", "max_freeze_ratio"):
        assert key in written["freezing"]


@pytest.mark.parametrize("name", COLUMNS)
def test_apf_freezes_the_share_of_settled_elements(name: str) -> None:
    """A third of the elements stands still, all others drift: thresholds of elements carry over."""
    apf = parse(name, WITHOUT_WEIGHTS, "--freezing.method=apf").freezing.apf
    n_tensors, n_checks = 60, 20
    weights = [torch.zeros(300) for _ in range(n_tensors)]
    drift = torch.cat([torch.zeros(100), torch.rand(200) + 0.5])
    names = [f"layers.{i}.w" for i in range(n_tensors)]
    layout = build_layout({0: [(name, 300) for name in names]})
    meter = ChangeMeter(list(zip(names, weights, strict=True)), apf.measurement)
    meter.begin()
    decision = apf.start(Check(0, layout, {}, 0))
    frozen = []
    for number in range(1, n_checks + 1):
        for weight in weights:
            weight += drift
        taken = {metric: np.array(values) for metric, values in meter.take().items()}
        decision = apf.decide(decision, Check(number, layout, taken, 0))
        frozen.append(decision.frozen.mean())
    spread = (1 / 3 * 2 / 3 / (n_tensors * n_checks)) ** 0.5
    assert np.mean(frozen) == pytest.approx(1 / 3, abs=5 * spread)
