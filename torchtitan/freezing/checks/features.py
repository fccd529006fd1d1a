"""Compatibility of features: the needs of each feature of a run."""

from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

from torchtitan.tools.utils import has_cuda_capability

from timelyfreeze.policies import (
    LORA,
    ComparesOutputs,
    freezes_by_turns,
    freezes_whole_layers,
    makes_plan,
    parse_method,
)
from timelyfreeze.settings import AUTO, auto_rank
from torchtitan.data.named_templates import AUTO as AUTO_TEMPLATE
from torchtitan.data.named_templates import PLAIN
from torchtitan.data.rows.kinds import is_image_dataset, is_instruct_dataset
from torchtitan.freezing.checks import requirements as needs
from torchtitan.freezing.checks.requirements import Feature, Requirement, Test, one_of, without
from torchtitan.freezing.values.pipeline import compiles_blocks, splits_backwards
from torchtitan.settings import IMAGE_MODELS, JobConfig, cuts_blocks, with_values
from torchtitan.vision.spec import known_args

_METHOD, _SCHEDULE = "freezing.method", "parallelism.pipeline_parallel_schedule"
_LINEAR, _GROUPED = "quantize.linear.float8", "quantize.grouped_mm.float8"


def _freezes(run: JobConfig) -> bool:
    return freezes_by_turns(run.freezing.method)


def _policy_name(run: JobConfig) -> str | None:
    with suppress(ValueError):  # reported as an error of its own
        if method := parse_method(run.freezing.method):
            return method.policy
    return None


def _policy(run: JobConfig) -> Any:
    return getattr(run.freezing, _policy_name(run) or "", None)


def _if_frozen(
    key: str, why: str, listed: Sequence[Requirement], when: Test | None = None
) -> Feature:
    """Return a feature ignored by a run without freezing."""
    is_on = when or attrgetter(key)
    return Feature(key, why, listed, lambda run: _freezes(run) and is_on(run))


def _freezes_parts(run: JobConfig) -> bool:
    """Return whether a policy may freeze a part of a block."""
    name = _policy_name(run)
    whole = name is None or freezes_whole_layers(name)
    return not whole or bool(getattr(_policy(run), "names", ()))


# fmt: off
_BY_BLOCK = Requirement(
    _METHOD, lambda run: not (_freezes_parts(run) or isinstance(_policy(run), ComparesOutputs)),
    "it must be a policy of whole blocks")
_LONE = (*needs.ONE_PIPELINE, needs.NO_REPLICAS)

CACHE = _if_frozen(
    "freezing.cache.enable",
    "what a front of blocks puts out for a row has to come again in the same process",
    (needs.NO_PLAN, needs.ROWS, needs.BLOCKS, *needs.SAME_INPUTS, *needs.WHOLE_LAYERS))
ELASTIC = _if_frozen(
    "freezing.elastic.enable", "the run has to go on in pipelines of fewer ranks, and more of them",
    (needs.A_POLICY, needs.ONE_RATIO, *needs.ONE_STAGE, *needs.WHOLE_LAYERS, needs.EXPERTS,
     needs.ROWS, needs.BLOCKS))
PACKING = _if_frozen(
    "freezing.packing.mode",
    "batches grow where a rank frees all memory of its only stage, in a pipeline that stays and "
    "whose memory can be estimated",
    (needs.NO_PLAN, *needs.FREES, needs.EAGER, *needs.ONE_STAGE, without(ELASTIC), without(CACHE),
     needs.NO_EMULATION, needs.ROWS, *_LONE, needs.BLOCKS,
     one_of("activation_checkpoint.mode", "none", "full")),
    lambda run: run.freezing.packing.is_on)
SUBSPACES = _if_frozen(
    "freezing.gradient_rank", "a subspace belongs to a whole layer with plain products",
    (*needs.WHOLE_LAYERS, one_of("model.converters", [])),
    lambda run: makes_plan(run.freezing.method) and run.freezing.gradient_rank not in (AUTO, 0))
# Also of a profile, whatever the method.
SPLIT = Feature(
    _SCHEDULE, "torch cannot split a backward through recomputed layers",
    (one_of("activation_checkpoint.mode", "none"),), splits_backwards)

_ADAPTERS = (
    needs.PEFT, needs.LLAMA3, needs.TENSORS, one_of("model.converters", []),
    one_of("optimizer.early_step_in_backward", False))

FEATURES = (
    # -- the pipeline
    Feature(
        "emulation.enable", "all ranks of one pipeline take turns in one process",
        (needs.PIPELINE, *needs.ONE_PIPELINE, needs.ONE_PROCESS, one_of("comm.mode", "default"))),
    Feature(
        "parallelism.pipeline_parallel_expert_parallel_overlap",
        "actions that overlap need an accelerator's streams and cannot be timed one by one",
        (needs.ACCELERATOR, one_of(_METHOD, "none", LORA), needs.NO_EMULATION),
        lambda run: run.parallelism.pipeline_parallel_degree > 1
        and run.parallelism.pipeline_parallel_schedule.lower() == "dualpipev"
        and run.parallelism.pipeline_parallel_expert_parallel_overlap),
    Feature(
        _SCHEDULE, "torch loses gradients of a backward that is split, and splits no compiled one",
        (one_of("parallelism.fsdp_reshard_after_forward", "default", "never"), needs.EAGER),
        lambda run: run.parallelism.pipeline_parallel_degree > 1 and splits_backwards(run)),
    Feature(
        "parallelism.context_parallel_degree",
        "torch has attention over several processes for accelerators only", (needs.ACCELERATOR,),
        lambda run: run.parallelism.context_parallel_degree > 1 and not run.emulation.enable),
    Feature(
        "parallelism.tensor_parallel_degree",
        "this torch fails in the backward of a compiled block whose tensors are split",
        (needs.EAGER,),
        lambda run: run.parallelism.tensor_parallel_degree > 1 and not run.emulation.enable),
    # -- the model and its data
    Feature(
        f'model.converters has "{_LINEAR}"', "torchao multiplies numbers of 8 bits on such a GPU",
        (needs.TORCHAO, needs.FLOAT8), lambda run: _LINEAR in run.model.converters),
    Feature(
        f"{_LINEAR}.emulate", "float8 is emulated in eager blocks only", (needs.EAGER,),
        lambda run: _LINEAR in run.model.converters and run.quantize.linear.float8.emulate
        and not has_cuda_capability(8, 9)),
    Feature(
        f'model.converters has "{_GROUPED}"', "torchao and upstream have it for one stage only",
        (needs.TORCHAO, needs.NO_PIPELINE), lambda run: _GROUPED in run.model.converters),
    Feature(
        "model.name", "it reads pictures, not text, in blocks that are neither split nor compiled",
        (needs.PICTURES, *needs.WHOLE_LAYERS, *needs.NO_TEXT, needs.EAGER),
        lambda run: run.model.name in IMAGE_MODELS),
    Feature(
        "training.dataset", "pictures are read from a place of their own, for models of pictures",
        (needs.OF_PICTURES, *needs.VISION, needs.PLACE, needs.VALIDATION_OF_PICTURES),
        lambda run: is_image_dataset(run.training.dataset)),
    Feature(
        "data.packing",
        "attention within examples needs examples, and whole heads and sequences on a device",
        (needs.INSTRUCTIONS, *needs.WHOLE_LAYERS)),
    *(
        Feature(f"data.{name}", "it is for examples", (needs.INSTRUCTIONS,))
        for name in ("paths", "weights", "subset", "split", "revision")
    ),
    Feature(
        "data.chat_template", "templates are for examples", (needs.INSTRUCTIONS,),
        lambda run: run.data.chat_template not in (AUTO_TEMPLATE, PLAIN)
        and not (run.validation.enable and is_instruct_dataset(run.validation.dataset))),
    Feature(
        "data.validation_fraction", "examples alone can be held out", (needs.ROWS,),
        lambda run: 0.0 < run.data.validation_fraction < 1.0),
    # -- methods
    Feature(
        _METHOD, "freezing works on the stages of a pipeline", (needs.PIPELINE,), _freezes),
    _if_frozen(SPLIT.key, SPLIT.why, SPLIT.needs, splits_backwards),
    Feature(
        _METHOD, "a compiled block has one backward, from which no single tensor can be left out",
        (needs.EAGER,),
        _freezes_parts),
    Feature(
        'compile.components has "model"',
        "the first batches of a phase compile and must not be measured", (needs.DISCARDS,),
        lambda run: compiles_blocks(run) and makes_plan(run.freezing.method)),
    Feature(
        _METHOD, "each rank compares whole outputs of blocks, of several pictures",
        (*needs.WHOLE_LAYERS, needs.SEVERAL_PICTURES, needs.PLAIN_MASKS),
        lambda run: isinstance(_policy(run), ComparesOutputs)),
    Feature(
        "checks_per_epoch of the policy is set",
        "an epoch has a number of steps that is known before it", (needs.ROWS, needs.UNPACKED),
        lambda run: getattr(_policy(run), "checks_per_epoch", 0)),
    SUBSPACES,
    Feature(
        _METHOD, "adapters of peft are beside whole plain layers of a text model, and alone learn",
        _ADAPTERS, lambda run: run.freezing.method == LORA),
    Feature(
        "lora.until",
        "peft's adapters come first, which no front has and no file of Hugging Face",
        (*_ADAPTERS, without(CACHE), without(ELASTIC), without(PACKING),
         one_of("freezing.run_ahead", False), one_of("checkpoint.last_save_in_hf", False))),
    # -- what follows from a frozen front
    CACHE,
    ELASTIC,
    _if_frozen(
        "freezing.elastic.partition", "a frozen front has to free its activations",
        (*needs.FREES, needs.EAGER), lambda run: run.freezing.elastic.is_by_time),
    _if_frozen(
        "freezing.elastic.search_microbatches",
        "each number that is tried is timed at once, without a plan",
        (needs.NO_EMULATION, needs.NO_PLAN), lambda run: run.freezing.elastic.searches),
    _if_frozen(
        "freezing.elastic.sublayers",
        "attention and MLP of a block freeze together",
        (_BY_BLOCK, needs.HALVES, needs.EAGER,
         one_of("freezing.elastic.partition", "parameters")),
        lambda run: run.freezing.elastic.cuts_blocks),
    Feature(
        "parallelism.module_fqns_per_model_part",
        "only an elastic run cuts blocks", (one_of("freezing.elastic.sublayers", True),),
        cuts_blocks),
    PACKING,
    _if_frozen(
        "freezing.packing.mode",
        "somebody has to start fewer processes, on the same host and from all of a checkpoint",
        (one_of("checkpoint.enable", True), one_of("checkpoint.load_only", False),
         one_of("checkpoint.load_step", -1), one_of("checkpoint.exclude_from_loading", []),
         needs.ONE_NODE, needs.LAUNCHER),
        lambda run: run.freezing.packing.gives_back),
    _if_frozen(
        "freezing.run_ahead",
        "ranks that hold the frozen front alone work for the next batch, which has to be known",
        (needs.NO_PLAN, needs.ROWS, needs.BLOCKS, needs.NO_EMULATION, *needs.ONE_STAGE,
         *_LONE, without(CACHE), without(ELASTIC), without(PACKING))),
    # -- upstream
    Feature(
        "optimizer.early_step_in_backward", "upstream has it without a pipeline only",
        (needs.NO_PIPELINE,)),
    Feature(
        "checkpoint.last_save_in_hf",
        "its files hold the model alone, without adapters, which timelyfreeze export merges",
        (needs.NO_ADAPTERS, one_of("checkpoint.last_save_model_only", True)),
        lambda run: run.checkpoint.enable and run.checkpoint.last_save_in_hf),
    Feature(
        "checkpoint.initial_load_in_hf", "no weights would be loaded",
        (one_of("checkpoint.enable", True),)),
    Feature(
        "profiling.enable_profiling", "upstream's profiler needs a GPU", (needs.ACCELERATOR,)),
)

# What only a run that trains here looks at.
DEVICE = Feature(
    "model.flavor", "torch counts the tokens of each expert on accelerators only",
    (needs.ACCELERATOR,),
    lambda run: hasattr(args := known_args(run), "moe_args") and getattr(args, "moe_enabled", True))
# What commands do with the configuration of a run.
PROFILE = Feature(
    "stages are profiled",
    "what freezing saves of one stage is timed, on one device and with whole sequences",
    (needs.PIPELINE, *needs.ONE_PIPELINE, needs.EAGER, needs.NO_ADAPTERS, needs.UNPACKED,
     one_of("training.enable_cpu_offload", False)),
    lambda run: True)
MEMORY = Feature(
    "memory is estimated",
    "the estimate is for pipeline parallelism alone and these models",
    (one_of("model.name", "llama3", *IMAGE_MODELS), *needs.ONE_PIPELINE,
     one_of("activation_checkpoint.mode", "none", "full")),
    lambda run: True)
# fmt: on


def with_rank(config: JobConfig) -> JobConfig:
    """Return ``config`` with the value of "auto" in ``freezing.gradient_rank``.

    It is 0 for models of pictures, which have no such width, and where subspaces do not work.
    """
    if config.freezing.gradient_rank != AUTO:
        return config
    works = makes_plan(config.freezing.method) and all(
        need.is_met(config) for need in SUBSPACES.needs
    )
    width = getattr(known_args(config), "dim", 0) if works else 0
    rank = auto_rank(width, config.freezing.last_warmup_step)
    return with_values(config, {"freezing.gradient_rank": rank})
