"""Requirements of features, with the change to make if unmet."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

import torch
from torchtitan.tools.utils import has_cuda_capability

from timelyfreeze.cli.torchrun import NEXT
from timelyfreeze.policies import PLANNED, makes_plan
from torchtitan.data.rows.kinds import (
    IMAGES,
    INSTRUCT_DATASETS,
    has_rows,
    is_image_dataset,
    is_instruct_dataset,
)
from torchtitan.freezing.values.pipeline import compiles_blocks, data_parallel_degree
from torchtitan.images.transforms import NONE
from torchtitan.settings import IMAGE_MODELS, JobConfig, examples_of_microbatch, has_pipeline
from torchtitan.vision.spec import known_args

Test = Callable[[JobConfig], Any]


@dataclass(frozen=True)
class Requirement:
    """A requirement of features.

    ``found`` is the breaking key, told with its value, or a sentence; ``rule`` is the change to
    make.
    """

    found: str
    is_met: Test
    rule: str


@dataclass(frozen=True)
class Feature:
    """A feature of a run, its reason for its ``needs``, and its switch.

    ``key`` is told with its value, or is a sentence. Without ``when`` any value of the key but 0,
    "" and false switches it on.
    """

    key: str
    why: str
    needs: Sequence[Requirement]
    when: Test | None = None

    def is_on(self, config: JobConfig) -> bool:
        """Return whether a run has the feature."""
        return bool(attrgetter(self.key)(config) if self.when is None else self.when(config))


def feature_errors(config: JobConfig, features: Sequence[Feature]) -> Iterator[str]:
    """Yield unmet needs of a run's features: key, value and rule."""
    for feature in features:
        if feature.is_on(config):
            for need in feature.needs:
                if not need.is_met(config):
                    found = f"{_told(config, feature.key)}, and {_told(config, need.found)}"
                    yield f"{found}; {feature.why}, so {need.rule}"


def one_of(key: str, *allowed: Any) -> Requirement:
    """Return the requirement of a key with some allowed values."""
    values, value_of = " or ".join(map(_shown, allowed)), attrgetter(key)
    return Requirement(key, lambda config: value_of(config) in allowed, f"it must be {values}")


def without(feature: Feature) -> Requirement:
    """Return the requirement of a run without another feature."""
    return Requirement(
        feature.key, lambda config: not feature.is_on(config), "switch one of them off"
    )


def _told(config: JobConfig, found: str) -> str:
    return found if " " in found else f"{found} is {_shown(attrgetter(found)(config))}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "unset" if value is None else repr(value)


_METHOD, _DATASET = "freezing.method", "training.dataset"
_DEGREE = "parallelism.pipeline_parallel_degree"
_SHARD = "parallelism.data_parallel_shard_degree"
# fmt: off

NO_PLAN = Requirement(
    _METHOD, lambda run: not makes_plan(run.freezing.method), "it must be a policy without a plan")
A_POLICY = Requirement(
    _METHOD, lambda run: run.freezing.method != PLANNED,
    f"it must be a policy, or '{PLANNED}+' and one")
ONE_RATIO = Requirement(
    "freezing.max_freeze_ratio",
    lambda run: not (makes_plan(run.freezing.method)
                     and isinstance(run.freezing.max_freeze_ratio, list)),
    "it must be one value")
NO_ADAPTERS = Requirement(
    _METHOD, lambda run: run.freezing.method != "lora", "it must be another")
DISCARDS = Requirement(
    "freezing.discard_batches", lambda run: run.freezing.discard_batches != 0,
    "it must be 1 or more")
# A frozen front then frees its activations.
FREES = (
    one_of("freezing.first_stage", "all_or_nothing"), one_of("freezing.skip_input_grads", "use"))

TENSORS = one_of("parallelism.tensor_parallel_degree", 1)
CONTEXTS = one_of("parallelism.context_parallel_degree", 1)
EXPERTS = one_of("parallelism.expert_parallel_degree", 1)
WHOLE_LAYERS = (TENSORS, CONTEXTS)
# A shard degree of -1 takes what is left, which is 1 where the pipeline has all ranks.
ONE_PIPELINE = (
    one_of("parallelism.data_parallel_replicate_degree", 1), one_of(_SHARD, 1, -1), *WHOLE_LAYERS,
    EXPERTS, one_of("parallelism.expert_tensor_parallel_degree", 1))
NO_REPLICAS = Requirement(
    _SHARD,
    lambda run: run.parallelism.data_parallel_shard_degree != -1
    or data_parallel_degree(run) in (None, 1),
    f"start as many processes as {_DEGREE}, or the others are replicas")
PIPELINE = Requirement(
    _DEGREE, has_pipeline,
    "it must be the number of ranks, 2 or more")
NO_PIPELINE = one_of(_DEGREE, 1)
ONE_STAGE = (
    one_of("parallelism.pipeline_parallel_schedule", "GPipe", "1F1B"),
    one_of("parallelism.pipeline_parallel_schedule_csv", "", None))
EAGER = Requirement(
    'compile.components has "model"', lambda run: not compiles_blocks(run),
    'set compile.enable = false or components = ["loss"]')
NO_EMULATION = one_of("emulation.enable", False)
ONE_PROCESS = Requirement(
    "several processes were started", lambda run: os.environ.get("WORLD_SIZE", "1") == "1",
    "start it with NGPU=1")
ONE_NODE = Requirement(
    "the run has several nodes",
    lambda run: not _is_started() or os.environ.get("GROUP_WORLD_SIZE", "1") == "1",
    "start it on one")
LAUNCHER = Requirement(
    "the run was started by torchrun alone", lambda run: not _is_started() or NEXT in os.environ,
    "start it by `timelyfreeze train` or run_train.sh")

LLAMA3 = one_of("model.name", "llama3")
# Models whose stages can be entered at any block.
BLOCKS = one_of("model.name", "llama3", *IMAGE_MODELS)
# Models whose blocks have an attention and an MLP.
HALVES = one_of("model.name", "llama3", "vit")
OF_PICTURES = one_of("model.name", *IMAGE_MODELS)
NO_TEXT = tuple(
    one_of(f"model.{name}", None)
    for name in (
        "vocab_size", "rope_scaling_factor", "rope_low_freq_factor", "rope_high_freq_factor",
        "rope_original_max_position_embeddings"))
UNPACKED = one_of("data.packing", False)
# What enters the front comes again in every epoch.
SAME_INPUTS = (
    UNPACKED,
    Requirement(
        "vision.augmentation",
        lambda run: not is_image_dataset(run.training.dataset) or run.vision.augmentation == NONE,
        f"it must be {NONE!r}"),
    Requirement("vision.mixup", lambda run: not run.vision.mixup, "it must be 0"))
INSTRUCTIONS = Requirement(
    _DATASET, lambda run: is_instruct_dataset(run.training.dataset),
    f"it must be one of {', '.join(INSTRUCT_DATASETS)}")
ROWS = Requirement(
    _DATASET, lambda run: has_rows(run.training.dataset),
    f"it must be one of {', '.join((*INSTRUCT_DATASETS, IMAGES))}")
PICTURES = Requirement(
    _DATASET, lambda run: is_image_dataset(run.training.dataset), f"it must be {IMAGES!r}")
VALIDATION_OF_PICTURES = Requirement(
    "validation.dataset",
    lambda run: not run.validation.enable or is_image_dataset(run.validation.dataset),
    f"it must be {IMAGES!r} too")
PLACE = Requirement(
    "training.dataset_path", lambda run: run.training.dataset_path,
    "it must name a folder, parquet files or a data set on the hub")
SEVERAL_PICTURES = Requirement(
    "parallelism.pipeline_parallel_microbatch_size makes microbatches of one picture",
    lambda run: run.model.name not in IMAGE_MODELS or examples_of_microbatch(run) != 1,
    "it must be 2 or more")
PLAIN_MASKS = Requirement(
    "model.flavor", lambda run: getattr(known_args(run), "attn_type", "sdpa") == "sdpa",
    "it must be one with the attn_type 'sdpa', whose blocks make their masks themselves")
ACCELERATOR = Requirement(
    "this machine has no accelerator", lambda run: torch.accelerator.is_available(),
    "do without it on a CPU")
FLOAT8 = Requirement(
    "no GPU of compute capability 8.9 or more is here",
    lambda run: has_cuda_capability(8, 9) or run.quantize.linear.float8.emulate,
    "set quantize.linear.float8.emulate = true, to try it slowly")
# fmt: on


def package(module: str, name: str, install: str) -> Requirement:
    """Return the requirement of an installed package, imported as ``module``."""
    found = f"the package {name} is not installed"
    return Requirement(found, lambda run: find_spec(module), install)


def _is_started() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


_EXTRA = "install the extra: pip install 'timelyfreeze[{}]'"
PEFT = package("peft", "peft", _EXTRA.format("lora"))
TORCHAO = package("torchao", "torchao", "install it")
VISION = (
    package("PIL", "pillow", _EXTRA.format("vision")),
    package("torchvision", "torchvision", _EXTRA.format("vision")),
)
