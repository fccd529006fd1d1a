"""Upstream's train spec with our parts put in: RoPE, data, loss, stages, validation, metrics."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import torch
import torchtitan.tools.utils as titan_tools
from torch import nn
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.config import Optimizer as OptimizerConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3.model.model import Transformer
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.protocols import train_spec as titan_spec
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.tools.logging import logger

from timelyfreeze.policies import LORA
from torchtitan.data.loader import loader_of, read_dataset
from torchtitan.data.named_templates import choice_told
from torchtitan.data.rows.kinds import has_rows, has_turns, is_image_dataset, is_instruct_dataset
from torchtitan.data.sources import ExampleSplit, training_sources
from torchtitan.data.text.tokenizer import FolderTokenizer
from torchtitan.data.validation import build_instruct_validator
from torchtitan.freezing.checks import (
    reads_training_examples,
    template_of,
    validation_split,
)
from torchtitan.freezing.emulation.pipeline import build_emulated_pipeline
from torchtitan.freezing.partition.sublayers import build_with_sublayers
from torchtitan.freezing.report.recorder import FreezingMetricsProcessor
from torchtitan.freezing.values.freezing import caches
from torchtitan.hf.adapter import LlamaAdapter
from torchtitan.hf.decoder import (
    Decoder,
    DecoderArgs,
    as_decoder,
    for_packing,
    learns_alone,
    require_turns,
)
from torchtitan.hf.flavors import chosen_args, known_flavors
from torchtitan.lora.adapters import with_adapters
from torchtitan.settings import JobConfig, Loading
from torchtitan.upstream.fixes import (
    SGD,
    PipelineLoss,
    autocast_stages,
    build_sgd,
    evaluate_forwards_alone,
    reduce_by_sum_on_cpu,
)
from torchtitan.vision.model import VisionArgs
from torchtitan.vision.spec import base_spec, with_classes


def build_train_spec(upstream: TrainSpec, job_config: JobConfig) -> TrainSpec:
    """Return ``upstream``'s spec for ``model.name`` with this fork's builders around its own.

    A ValueError if the flavor is unknown, its folder cannot be read, RoPE keys are set for a model
    without RoPE, or the model cannot read packed sequences or conversations.
    """
    flavor = job_config.model.flavor
    model_args = chosen_args(job_config, upstream.model_args)
    if isinstance(model_args, VisionArgs):
        model_args = with_classes(model_args, job_config)
    if job_config.data.packing:
        model_args = for_packing(upstream.model_cls, flavor, model_args)
    elif has_turns(job_config.training.dataset):
        require_turns(flavor, model_args)
    if upstream.model_cls is Transformer and model_args.attn_type == "sdpa":
        model_args = as_decoder(model_args)
    learned_alone = isinstance(model_args, DecoderArgs) and learns_alone(job_config, model_args)
    ours = _Builders(upstream, learned_alone)
    spec = replace(
        upstream,
        model_cls=Decoder if isinstance(model_args, DecoderArgs) else upstream.model_cls,
        model_args={**known_flavors(job_config, upstream.model_args), flavor: model_args},
        build_tokenizer_fn=ours.tokenizer if upstream.build_tokenizer_fn else None,
        state_dict_adapter=LlamaAdapter
        if upstream.state_dict_adapter is Llama3StateDictAdapter
        else upstream.state_dict_adapter,
        parallelize_fn=ours.parallelized,
        pipelining_fn=_pipelined(upstream.pipelining_fn) if upstream.pipelining_fn else None,
        build_optimizers_fn=ours.optimizers,
        build_loss_fn=ours.loss,
        build_dataloader_fn=ours.dataloader,
        build_validator_fn=ours.validator if upstream.build_validator_fn else None,
        build_metrics_processor_fn=FreezingMetricsProcessor,
    )
    if job_config.freezing.method != LORA:
        return spec
    return with_adapters(spec, job_config.lora, job_config.freezing.seed)


def register_spec(job_config: JobConfig) -> None:
    """Make the spec of a configuration that which trainers take; as :func:`build_train_spec`."""
    name = job_config.model.name
    titan_spec._extra_train_specs.pop(name, None)
    titan_spec.register_train_spec(name, build_train_spec(base_spec(job_config), job_config))


def _pipelined(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function cutting a model into stages as upstream, with upstream's faults mended."""

    @wraps(upstream)
    def pipelined(
        model: nn.Module,
        parallel_dims: ParallelDims,
        config: JobConfig,
        device: torch.device,
        *args: Any,
    ) -> Any:
        build: Callable[..., Any] = partial(build_with_sublayers, upstream)
        if config.emulation.enable:
            build = partial(build_emulated_pipeline, build)
        built = build(model, parallel_dims, config, device, *args)
        autocast_stages(built[1], parallel_dims, config, device)
        evaluate_forwards_alone(built[0])
        return built

    return pipelined


def loading_of(job_config: JobConfig, dp_world_size: int) -> Loading:
    """Return the settings of reading: on GPUs a process prepares the next step's batches.

    Copies from pinned memory need not be waited for. A cache reads ahead in the process itself.
    Pictures may be too large for shared memory in a container.
    """
    training = job_config.training
    given, on_gpu = training.dataloader, titan_tools.device_type == "cuda"
    reads_beside = on_gpu and is_instruct_dataset(training.dataset) and not caches(job_config)
    n_batches = training.global_batch_size // (training.local_batch_size * dp_world_size)
    return replace(
        given,
        num_workers=int(reads_beside) if given.num_workers == -1 else given.num_workers,
        pin_memory=given.pin_memory or on_gpu,
        prefetch_factor=given.prefetch_factor or max(2, n_batches),
    )


@dataclass(frozen=True)
class _Builders:
    """Replacements of upstream's builders, with the same arguments."""

    upstream: TrainSpec  # has those that are called where nothing of ours is wanted
    learns_alone: bool  # whether the last stage can leave out tokens that nobody learns

    def parallelized(self, *args: Any) -> nn.Module:
        return reduce_by_sum_on_cpu(self.upstream.parallelize_fn(*args))

    def loss(self, config: JobConfig, parallel_dims: ParallelDims, **kwargs: Any) -> Any:
        loss_fn = self.upstream.build_loss_fn(config, parallel_dims=parallel_dims, **kwargs)
        if not parallel_dims.pp_enabled:
            return loss_fn
        is_known = self.upstream.build_loss_fn is build_cross_entropy_loss
        return PipelineLoss(loss_fn, of_learned=is_known and self.learns_alone)

    def optimizers(
        self, model_parts: list[nn.Module], config: OptimizerConfig, *args: Any, **kwargs: Any
    ) -> Any:
        build = build_sgd if config.name == SGD else self.upstream.build_optimizers_fn
        return build(model_parts, config, *args, **kwargs)

    def tokenizer(self, config: JobConfig) -> Any:
        return FolderTokenizer(config.model.hf_assets_path)

    def dataloader(self, *, job_config: JobConfig, tokenizer: Any, **kwargs: Any) -> Any:
        loading = loading_of(job_config, kwargs["dp_world_size"])
        training, data = replace(job_config.training, dataloader=loading), job_config.data
        job_config = replace(job_config, training=training)
        if is_image_dataset(training.dataset):
            kwargs["fixed_shards"] = caches(job_config)
        elif not is_instruct_dataset(training.dataset):
            kwargs["tokenizer"] = tokenizer
        if not is_instruct_dataset(training.dataset):
            return self.upstream.build_dataloader_fn(job_config=job_config, **kwargs)
        if told := choice_told(data.chat_template, job_config.model.hf_assets_path):
            logger.info(told)
        dataset = read_dataset(
            training_sources(job_config),
            tokenizer=tokenizer,
            seq_len=training.seq_len,
            shuffle_seed=data.seed if data.shuffle else None,
            split=ExampleSplit(data.validation_fraction),
            template=template_of(job_config, tokenizer),
            packing=data.packing,
            # Else a row would go to a process that has not kept it.
            fixed_shards=caches(job_config),
            **kwargs,
        )
        return loader_of(dataset, training.local_batch_size, **vars(training.dataloader))

    def validator(self, *, job_config: JobConfig, **kwargs: Any) -> Any:
        build: Any = self.upstream.build_validator_fn
        dataset = job_config.validation.dataset
        if not has_rows(dataset):
            return build(job_config=job_config, **kwargs)
        if reads_training_examples(job_config):
            logger.warning(
                "Validation reads the examples that are trained on; data.validation_fraction holds "
                "some of them out"
            )
        if not is_image_dataset(dataset):
            build = build_instruct_validator
            kwargs["template"] = template_of(job_config, kwargs["tokenizer"])
        return build(job_config=job_config, split=validation_split(job_config), **kwargs)
