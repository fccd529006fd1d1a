"""How a configuration lays out its pipeline, told without processes or a model, and in a file."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from timelyfreeze.schedule import (
    Action,
    ActionKind,
    ScheduleOrder,
    build_order,
    order_from_csv,
    stages_per_rank,
)
from timelyfreeze.settings import first_stage_mode
from timelyfreeze.whatif.bounds_file import PipelineMetadata
from timelyfreeze.whatif.grid import layers_of_split
from torchtitan.settings.job_config import JobConfig


def has_pipeline(config: JobConfig) -> bool:
    """Return whether microbatches run through stages, or through the only one of an elastic run."""
    parallelism = config.parallelism
    cut = parallelism.module_fqns_per_model_part or ()
    is_last_form = config.freezing.elastic.enable and len(cut) == 1
    return parallelism.pipeline_parallel_degree > 1 or is_last_form


def stage_modules(config: JobConfig, n_layers: int) -> list[list[str]]:
    """Return the modules of stages, cut as by upstream; ValueError for too few layers.

    The schedule is known to torch.
    """
    parallelism = config.parallelism
    if parallelism.module_fqns_per_model_part is not None:
        return parallelism.module_fqns_per_model_part
    first = parallelism.pipeline_parallel_first_stage_less_layers
    last = parallelism.pipeline_parallel_last_stage_less_layers
    per_stage = parallelism.pipeline_parallel_layers_per_stage
    n_stages = parallelism.pipeline_parallel_degree
    if n_stages > 1:
        of_rank = stages_per_rank(parallelism.pipeline_parallel_schedule)
        assert of_rank is not None  # torch knows the schedule
        n_stages *= of_rank
        if per_stage is not None:
            n_stages = math.ceil((n_layers + first + last) / per_stage)
    # Imported late: it loads models, and values are checked without.
    from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part

    try:
        return generate_llm_fqn_per_model_part(n_stages, n_layers, first, last)
    except ValueError as error:
        raise ValueError(
            f"a model of {n_layers} layers cannot be cut into {n_stages} stages ({error}); change "
            "parallelism.pipeline_parallel_degree, pipeline_parallel_layers_per_stage, "
            "pipeline_parallel_first_stage_less_layers or pipeline_parallel_last_stage_less_layers"
        ) from error


def pipeline_order(config: JobConfig, n_layers: int) -> ScheduleOrder:
    """Return the order of the ranks' work; without a pipeline, forward and backward.

    A ValueError if its stages are not the model's.
    """
    parallelism = config.parallelism
    n_ranks, csv = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule_csv
    name = parallelism.pipeline_parallel_schedule
    n_stages = len(stage_modules(config, n_layers))
    if n_stages % n_ranks:
        raise ValueError(
            f"the model is cut into {n_stages} stages, which "
            f"parallelism.pipeline_parallel_degree ({n_ranks}) must divide; change "
            "parallelism.pipeline_parallel_layers_per_stage or module_fqns_per_model_part"
        )
    if not has_pipeline(config):
        order = build_order(
            [[Action(0, kind, 0) for kind in (ActionKind.FORWARD, ActionKind.FULL_BACKWARD)]]
        )
    elif csv:
        order = order_from_csv(Path(csv).read_text())
    else:
        from timelyfreeze.runtime import named_order  # late likewise

        n = config.training.local_batch_size // examples_of_microbatch(config)
        order = named_order(name, n_ranks, n, stages_per_rank=n_stages // n_ranks)
    if order.n_stages != n_stages:
        raise ValueError(
            f"the model is cut into {n_stages} stages and the schedule ({name}) has "
            f"{order.n_stages}; change parallelism.pipeline_parallel_layers_per_stage or "
            "module_fqns_per_model_part"
        )
    return order


def examples_of_microbatch(config: JobConfig) -> int:
    """Return the sequences of a microbatch; without a pipeline the whole batch."""
    if not has_pipeline(config):
        return config.training.local_batch_size
    return config.parallelism.pipeline_parallel_microbatch_size


def global_rows(config: JobConfig) -> int:
    """Return the sequences of a step of a run without replicas."""
    rows = config.training.global_batch_size
    return rows if rows > 0 else config.training.local_batch_size  # upstream: below 1 for one batch


def pipeline_title(config: JobConfig) -> str:
    """Return model, pipeline, batch and types of a configuration in words."""
    training, parallelism = config.training, config.parallelism
    n_ranks, n_examples = parallelism.pipeline_parallel_degree, examples_of_microbatch(config)
    schedule = parallelism.pipeline_parallel_schedule_csv or parallelism.pipeline_parallel_schedule
    pipeline = f"{schedule} over {n_ranks} ranks, " if n_ranks > 1 else ""
    emulated = "emulated in one process, " if config.emulation.enable else ""
    family = model_family(config)
    of_row = f"x {training.seq_len} {family.unit}" if family.reads_text else family.unit
    return (
        f"{config.model.flavor}, {pipeline}{emulated}"
        f"{training.local_batch_size // n_examples} microbatches of {n_examples} {of_row}, "
        f"weights {training.dtype}, computing in {training.mixed_precision_param}"
    )


def pipeline_metadata(
    job_config: JobConfig,
    order: ScheduleOrder,
    n_layers: int | None,
    n_processors: float | None = None,
    sizes: PipelineMetadata | None = None,
) -> PipelineMetadata:
    """Return ``sizes`` with a configuration's facts on the measured pipeline."""
    parallelism, freezing = job_config.parallelism, job_config.freezing
    family = model_family(job_config)
    layers = () if n_layers is None else count_layers(stage_modules(job_config, n_layers))
    has_name = not parallelism.pipeline_parallel_schedule_csv
    return replace(
        sizes or PipelineMetadata(),
        schedule=parallelism.pipeline_parallel_schedule if has_name else None,
        ranks=order.n_ranks,
        processors=n_processors,
        first_stage=first_stage_mode(freezing.first_stage, max(freezing.gradient_ranks)),
        gradient_rank=max(freezing.gradient_ranks),
        skip_input_grads=freezing.skip_input_grads,
        layers=layers if len(layers) == order.n_stages and not cuts_blocks(job_config) else None,
        tokens_per_microbatch=examples_of_microbatch(job_config)
        * (job_config.training.seq_len if family.reads_text else 1),
        unit=family.unit,
    )


ATTENTION, MLP = SUBLAYERS = "attention", "mlp"


def modules_of_split(split: Sequence[int], *, sublayers: bool = False) -> list[list[str]]:
    """Return the modules of stages with so many layers; embedding, norm and head lie at ends.

    With ``sublayers`` they have so many attentions and MLPs. The attention of a block that is cut
    is ``layers.3/attention``.
    """
    parts = layers_of_split(split)
    stages = [_layers_of(part) if sublayers else [f"layers.{i}" for i in part] for part in parts]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "output"]
    return stages


def count_layers(stages: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """Return the number of layers among the modules of stages; a cut block is where it begins."""
    return tuple(
        sum(name.startswith("layers.") and not name.endswith(f"/{MLP}") for name in modules)
        for modules in stages
    )


def count_sublayers(stages: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """Return the number of attentions and MLPs among the modules of stages."""
    return tuple(
        sum(1 if "/" in name else 2 for name in modules if name.startswith("layers."))
        for modules in stages
    )


def cuts_blocks(config: JobConfig) -> bool:
    """Return whether a stage ends between the attention and the MLP of a block."""
    stages = config.parallelism.module_fqns_per_model_part or ()
    return any("/" in name for modules in stages for name in modules)


def _layers_of(units: range) -> list[str]:
    """Return the names of blocks and of their parts, of the numbers of attentions and MLPs."""
    names: dict[str, None] = {}
    for unit in units:
        block, half = divmod(unit, 2)
        is_whole = 2 * block + 1 - half in units
        names[f"layers.{block}" if is_whole else f"layers.{block}/{SUBLAYERS[half]}"] = None
    return list(names)


class ModelFamily(NamedTuple):
    """A kind of model: the unit of throughput, and whether rows are texts of ``seq_len`` tokens."""

    unit: str
    reads_text: bool


IMAGE_MODELS = ("vit", "convnextv2")


def padding_note(config: JobConfig) -> str:
    """Return the remark on the throughput of steps counting fewer tokens than are read."""
    leaves_out = model_family(config).reads_text and not config.report.count_padding
    return " without padding" if leaves_out else ""


def model_family(config: JobConfig) -> ModelFamily:
    """Return the family of ``model.name``."""
    is_image = config.model.name in IMAGE_MODELS
    return ModelFamily("images" if is_image else "tokens", reads_text=not is_image)
