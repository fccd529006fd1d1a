"""The configuration: TorchTitan's, and the sections of this fork.

The string under a field is its documentation and its ``--help``. Annotations are evaluated here (no
``from __future__ import annotations``): upstream's manager looks at the types of nested sections.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from functools import cache
from typing import Any, get_type_hints

from torchtitan.config import JobConfig as TitanJobConfig
from torchtitan.config import Model as TitanModel
from torchtitan.config import Parallelism as TitanParallelism
from torchtitan.config.job_config import DataLoader as TitanDataLoader
from torchtitan.config.job_config import Training as TitanTraining
from torchtitan.config.job_config import Validation as TitanValidation

from timelyfreeze.files import read_as
from timelyfreeze.policies import registered_policies
from timelyfreeze.settings import CacheSettings, ElasticSettings, FreezeSettings, PackingSettings
from torchtitan.lora import Lora


@dataclass
class Vision:
    """How pictures (training.dataset "images") are read; see docs/data.md."""

    image_size: int = 224
    """Height and width of the pictures that the model gets, in pixels."""

    image_column: str = "image"
    """Column of the pictures, in data that has columns."""

    label_column: str = "label"
    """Column of the labels: whole numbers from 0."""

    subset: str = ""
    """For a name on the hub: which of its data sets. Unset: the default one."""

    split: str = "train"
    """For a name on the hub: its part to train on."""

    validation_split: str = ""
    """For a name on the hub: its part to validate on. Unset: that of training."""

    classes: int = 0
    """Number of classes. 0 takes it from the data: from the names of its classes if it has them,
    else the highest label and 1."""

    augmentation: str = "resized_crop"
    """What training does to a picture at random. "resized_crop": a part of it, 8% to all of its
    area, resized, half of them flipped. "padded_crop", for small pictures: moved by up to an eighth
    of its size, half of them flipped. "none": the same as validation."""

    mean: list[float] | None = None
    """Mean of the colors red, green and blue, of 1, that is taken off. Unset: image_mean in
    preprocessor_config.json of model.hf_assets_path, else that of ImageNet."""

    std: list[float] | None = None
    """What colors are divided by then. Unset: image_std there, else that of ImageNet."""

    mixup: float = 0.0
    """Mix each picture and its label with another of the batch. The share comes from the beta
    distribution with this number twice. 0 mixes none."""

    label_smoothing: float = 0.0
    """Part of the label, in [0, 1), that is spread over all classes in training."""


@dataclass(frozen=True)
class Freezing(FreezeSettings):
    """Freezing method and its settings."""

    method: str = "none"
    """Freezing method: "none" (plain TorchTitan), "timelyfreeze", a policy such as "apf" (see
    docs/methods.md), or "timelyfreeze+<policy>": the plan says how much, the policy which
    tensors. A policy's settings are in [freezing.<policy>]. "lora" trains adapters alone: see
    [lora]."""

    preset: str = ""
    """Keys that belong together, set by one word. "paper": all that arXiv:2602.05754 does and we do
    otherwise by default (see docs/method.md). A run prints what it has set."""

    run_ahead: bool = False
    """Let stages that are frozen whole forward the next batch while live stages work on this one.
    For methods that freeze the front and make no plan: see docs/front.md."""

    cache: CacheSettings = field(default_factory=CacheSettings)
    """Cache of what the frozen front puts out (see docs/front.md)."""

    elastic: ElasticSettings = field(default_factory=ElasticSettings)
    """A pipeline that becomes shorter as the front freezes (see docs/front.md)."""

    packing: PackingSettings = field(default_factory=PackingSettings)
    """Larger batches in the memory that the frozen front sets free (see docs/front.md)."""


@dataclass
class Columns:
    """Columns of the rows with other names than here."""

    messages: str = ""
    """A list of messages, each with role and content."""

    conversations: str = ""
    """A list of messages, each with from and value."""

    tools: str = ""
    """Tools that may be called in the messages."""

    prompt: str = ""
    """A text, or a list of messages."""

    completion: str = ""
    """What is learned: a text, or a list of messages."""

    instruction: str = ""
    """What is asked."""

    input: str = ""
    """What an instruction is about, which may be missing."""

    output: str = ""
    """The answer."""


@dataclass
class Data:
    """How instruction data is read: training.dataset "auto" or the kind of its rows."""

    paths: list[str] = field(default_factory=list)
    """Several files, folders or hub data sets, instead of training.dataset_path."""

    weights: list[float] = field(default_factory=list)
    """How often each of data.paths comes in an epoch, above 0 and up to 1000. 2.5: every example
    twice, and half of them, always the same, once more. Unset: once each."""

    subset: str | list[str] = ""
    """Subset (configuration) of a hub data set: one value, or one for each of data.paths."""

    split: str | list[str] = ""
    """Split of a hub data set: one value, or one for each of data.paths. Unset: "train"."""

    revision: str | list[str] = ""
    """Commit, branch or tag of a hub data set: one value, or one for each of data.paths."""

    columns: Columns = field(default_factory=Columns)

    shuffle: bool = True
    """Draw the examples of each epoch in a new random order."""

    seed: int = 42
    """Seed of that order, the same on every rank."""

    validation_fraction: float = 0.0
    """Fraction of the examples, in [0, 1), that is held out of training. Validation reads it where
    validation.dataset and validation.dataset_path name the same data as those of training. Which
    examples these are depends on no seed."""

    chat_template: str = "auto"
    """How the messages of an example become text: "tokenizer" (the chat template in
    model.hf_assets_path), "alpaca", "llama2", "llama3", "chatml" or "plain" (our own, with headers
    in words). "auto": the tokenizer's own, else "alpaca"."""

    packing: bool = False
    """Put several examples into one sequence of training.seq_len tokens, without attention from one
    to another. Otherwise each example is padded to that length. training.local_batch_size counts
    sequences."""

    all_logits: bool = False
    """Compute logits of all tokens, as TorchTitan does, also of those that nobody learns."""


@dataclass
class Emulation:
    """Emulation of the pipeline in a single process (see docs/plan.md)."""

    enable: bool = False
    """Run all parallelism.pipeline_parallel_degree ranks in this one process, one action at a time
    and without communication. A virtual clock says how long the pipeline would have taken on a
    device for each rank. Start it with NGPU=1."""


@dataclass
class Plots:
    """Drawing of a run's measurements."""

    enable: bool = True
    """Draw timelines and curves into the folder "plots" of the run, and show them in TensorBoard:
    whenever a phase has been measured, and at the end. A process of its own draws, at the lowest
    priority. Training does not wait for it. Without, draw them later from the run's files:
    timelyfreeze draw RUN_FOLDER."""


@dataclass
class Report:
    """Output of a run."""

    quiet: bool = False
    """Print only warnings, errors and where the report is. --quiet is short for it."""

    count_padding: bool = False
    """Count padding among the tokens of tokens/s and of TFLOP/s, as TorchTitan and
    arXiv:2602.05754 do. Without, only tokens of examples count."""

    reference_run: str | None = None
    """Folder of another run: the report tells when this run reached the training loss that the
    other ended with."""

    note: str = ""
    """A sentence of the configuration's author, which the report ends with."""

    device_hour_price: float = 0.0
    """What a device costs in an hour, in any currency: the report tells what the run's devices
    cost, 0 or more. 0: it does not."""


@dataclass
class Model(TitanModel):
    """The model to train."""

    vocab_size: int | None = None
    """Number of token embeddings, for a tokenizer that needs another number than the flavor has.
    Unset: the flavor's."""

    rope_scaling_factor: float | None = None
    """RoPE scaling factor: 1 for Llama 2, Llama 3 and SmolLM2, 8 for Llama 3.1, 32 for Llama 3.2.
    Unset: the flavor's own, which upstream sets to 8 for every llama3."""

    rope_low_freq_factor: float | None = None
    """RoPE scaling: wavelengths longer than the original context over this are scaled fully. Unset:
    the flavor's own."""

    rope_high_freq_factor: float | None = None
    """RoPE scaling: wavelengths shorter than the original context over this stay as they are.
    Unset: the flavor's own."""

    rope_original_max_position_embeddings: int | None = None
    """RoPE scaling: the context length the model was first trained with. Unset: the flavor's
    own."""


@dataclass
class Parallelism(TitanParallelism):
    """How the work is divided among devices."""

    partition: str = ""
    """How the model is cut into stages: "time", "parameters" or "memory" hand out the layers so
    that the rank that has most of it has as little as can be. Unset: TorchTitan's own cut, by the
    number of layers. A run prints the split and its loads."""

    partition_profile: str = ""
    """For partition "time": the bounds.json that `timelyfreeze profile` or a training run with a
    plan has written for this model, the same file on every host."""


@dataclass
class Loading(TitanDataLoader):
    """How batches are read."""

    num_workers: int = -1
    """Processes that read beside training. -1: one for instruction data on GPUs, else none."""


@dataclass
class Training(TitanTraining):
    """Length and data of training."""

    dataloader: Loading = field(default_factory=Loading)


@dataclass
class Validation(TitanValidation):
    """Loss of examples outside of training."""

    def __post_init__(self) -> None:
        """Assert nothing: checks tell all errors at once."""


@dataclass
class JobConfig(TitanJobConfig):
    """TorchTitan's configuration with the sections that this fork adds."""

    model: Model = field(default_factory=Model)
    parallelism: Parallelism = field(default_factory=Parallelism)
    training: Training = field(default_factory=Training)
    validation: Validation = field(default_factory=Validation)
    freezing: Freezing = field(default_factory=Freezing)
    lora: Lora = field(default_factory=Lora)
    data: Data = field(default_factory=Data)
    vision: Vision = field(default_factory=Vision)
    emulation: Emulation = field(default_factory=Emulation)
    plots: Plots = field(default_factory=Plots)
    report: Report = field(default_factory=Report)


# Where keys are called otherwise than arguments of the library, or stand in another section.
_KEYS = {
    "begin_anew": 'set checkpoint.exclude_from_loading = ["freezing"]',
    "microbatches": "training.local_batch_size / parallelism.pipeline_parallel_microbatch_size",
    "n_ranks": "parallelism.pipeline_parallel_degree",
    "pipeline": "the same parallelism.pipeline_* keys",
    "schedule": "parallelism.pipeline_parallel_schedule",
    "schedule_csv": "parallelism.pipeline_parallel_schedule_csv",
}


def toml_key(argument: str) -> str:
    """Return the key behind an argument of the library."""
    return _KEYS.get(argument, f"freezing.{argument}")


def cache_folder(config: JobConfig) -> str:
    """Return the folder of a run's stored front outputs."""
    return os.path.join(config.job.dump_folder, config.freezing.cache.folder)


def config_of_run(settings: Mapping[str, Any], *sections: str) -> JobConfig:
    """Return some sections as a run had them, or ValueError; former runs lack some of ours."""
    config = JobConfig()
    for section in sections:
        own = getattr(config, section)
        hints = get_type_hints(type(own), include_extras=True)
        found = read_as(dict[str, Any], settings.get(section, {}), section)
        for key in found.keys() & hints.keys():
            setattr(own, key, read_as(hints[key], found[key], f"{section}.{key}"))
    return config


def job_config_class() -> type[JobConfig]:
    """Return the configuration with a section ``[freezing.<name>]`` for every registered policy."""
    return _with_sections(tuple(sorted(registered_policies().items())))


@cache
def _with_sections(policies: tuple[tuple[str, type], ...]) -> type[JobConfig]:
    sections = [(name, policy, field(default_factory=policy)) for name, policy in policies]
    freezing = make_dataclass(
        "Freezing",
        sections,
        bases=(Freezing,),
        namespace={"__doc__": Freezing.__doc__},
        frozen=True,
    )
    return make_dataclass(
        "JobConfig",
        [("freezing", freezing, field(default_factory=freezing))],
        bases=(JobConfig,),
        namespace={"__doc__": JobConfig.__doc__},
    )
