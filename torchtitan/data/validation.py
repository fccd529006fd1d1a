"""Validation on instruction data: upstream's validator, its loader swapped, its average mended."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice, repeat
from typing import Any, TypeVar, cast

import torch.distributed as dist
import torchtitan.components.validate as titan_validate
from torch import Tensor, nn
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.validate import Validator
from torchtitan.distributed import utils as titan_dist
from torchtitan.tools import utils as titan_tools

from torchtitan.data.dataset import PackedOnce
from torchtitan.data.loader import ResizableDataloader, read_dataset, validation_loader
from torchtitan.data.sequences import IGNORE_INDEX, Batch, Template, learned_tokens, to_every_stage
from torchtitan.data.sources import ExampleSplit, validation_sources
from torchtitan.settings import JobConfig

T = TypeVar("T")


class BatchValidator(Validator):
    """Upstream's validator over a loader of ours, handed a batch at a time.

    So losses can be weighted by a batch's content. With ``validation.steps`` set the loader is
    restarted as needed; every validation begins with the first batch.
    """

    def __init__(
        self,
        loader: BaseDataLoader,
        job_config: JobConfig,
        metrics_processor: Any,
        **kwargs: Any,
    ) -> None:
        # Upstream never sees more than one batch. Told so, it does not warn of ranks that run out
        # of data at different times, which those of this loader do not.
        one_step = replace(job_config, validation=replace(job_config.validation, steps=1))
        self._one_loss = _OneLoss()
        with _no_text_loader():
            super().__init__(job_config=one_step, **kwargs | {"metrics_processor": self._one_loss})
        self._loader = loader
        self._n_steps = job_config.validation.steps
        self._last_step = job_config.training.steps
        self._counts_padding = job_config.report.count_padding
        self._metrics_processor = metrics_processor

    def should_validate(self, step: int) -> bool:
        """Return whether to validate after a step: as upstream does, and after the run's last."""
        return super().should_validate(step) or step == self._last_step

    def _evaluate(
        self, model_parts: list[nn.Module], step: int, inputs: dict[str, Tensor], labels: Tensor
    ) -> float:
        """Return upstream's loss of a batch of all replicas."""
        self.validation_dataloader = cast(Any, [(inputs, labels)])
        super().validate(model_parts, step)
        return self._one_loss.value

    def _batches(self) -> Iterator[Batch]:
        if self._n_steps == -1:
            return iter(self._loader)
        return islice(chain.from_iterable(repeat(self._loader)), self._n_steps)

    def _of_all_replicas(self, count: Tensor) -> float:
        """Return the sum of a number, [], of every replica."""
        if not self.parallel_dims.dp_enabled:
            return float(count)
        mesh = self.parallel_dims.get_mesh("batch")
        return titan_dist.dist_sum(count.to(titan_tools.device_type), mesh)

    def _gathered(self, parts: list[T]) -> list[T]:
        """Return the parts of every replica, those of the first one first."""
        if not self.parallel_dims.dp_enabled:
            return parts
        group = self.parallel_dims.get_mesh("batch").get_group()
        found: list[list[T]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(found, parts, group=group)
        return [*chain.from_iterable(found)]


class InstructValidator(BatchValidator):
    """Validates on examples of instruction data, in batches of ``build_validation_loader``.

    The loss is the mean over all target tokens. Upstream averages over batches, with more weight
    for tokens of small batches; here batches are weighted by their tokens.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.pp_schedule is not None:
            self.pp_schedule = self._microbatches = _Microbatches(self.pp_schedule)

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Evaluate the model and log the loss; all ranks come here at the same steps."""
        loss_sum, n_targets = 0.0, 0.0
        parts: list[tuple[int, float]] = []
        with counted_apart(self._metrics_processor) as processor:
            for input_dict, labels in self._batches():
                n_tokens = int(input_dict.n_tokens.sum())
                counted = labels.numel() if self._counts_padding else n_tokens
                processor.ntokens_since_last_log += counted
                if getattr(self.loss_fn, "of_learned", False):
                    input_dict |= learned_tokens(labels)
                targets = self._of_all_replicas((labels != IGNORE_INDEX).sum())
                if targets:  # none in a batch that has padding alone on every replica
                    loss = self._evaluate(model_parts, step, input_dict, labels)
                    loss_sum += targets * loss
                    n_targets += targets
                    parts += self._parts(labels, int(targets), loss)
            processor.log_held_out(step, parts)
            processor.log_validation(loss=loss_sum / n_targets, step=step)

    def _parts(self, labels: Tensor, n_targets: int, loss: float) -> list[tuple[int, float]]:
        """Return targets and mean loss of each microbatch of all replicas.

        Without a pipeline the batch is one; where the last stage is not, nothing is known.
        """
        if self.pp_schedule is None:
            return [(n_targets, loss)]
        sums = self._microbatches.sums
        counts = [int((one != IGNORE_INDEX).sum()) for one in labels.tensor_split(len(sums) or 1)]
        own = [(n, total / n) for n, total in zip(counts, sums, strict=False) if n]
        return self._gathered(own)

    def post_dataloading_process(
        self, input_dict: dict[str, Tensor], labels: Tensor, model_parts: list[nn.Module]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Any]]:
        """Separate the first stage's inputs from every stage's."""
        inputs, labels, *kwargs = super().post_dataloading_process(input_dict, labels, model_parts)
        return inputs, labels, *to_every_stage(*kwargs)


class _Microbatches:
    """Keeps the sum loss of each microbatch, of which upstream's validator keeps their sum."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule
        self.sums: list[float] = []  # of the last batch; empty where the last stage is not

    def eval(self, *args: Any, losses: list[Tensor] | None = None, **kwargs: Any) -> None:
        self._schedule.eval(*args, losses=losses, **kwargs)
        self.sums = [float(loss) for loss in losses or ()]


class _OneLoss:
    """Stands in for the metrics processor while upstream evaluates a batch."""

    ntokens_since_last_log = 0
    value = float("nan")

    def log_validation(self, loss: float, step: int) -> None:
        self.value = loss


@contextmanager
def _no_text_loader() -> Iterator[None]:
    """Keep upstream's validator from looking for a text data set of our name."""
    original = titan_validate.build_text_validation_dataloader
    titan_validate.build_text_validation_dataloader = lambda **kwargs: cast(Any, [])
    try:
        yield
    finally:
        titan_validate.build_text_validation_dataloader = original


@contextmanager
def counted_apart(processor: Any) -> Iterator[Any]:
    """Let the processor count tokens and time of a validation, and then go on with training's.

    Upstream starts both again after a validation, and so takes the steps since the last log out of
    the next logged speed.
    """
    n_tokens, started = processor.ntokens_since_last_log, time.perf_counter()
    seconds = started - processor.time_last_log
    processor.ntokens_since_last_log, processor.time_last_log = 0, started
    yield processor
    processor.ntokens_since_last_log = n_tokens
    processor.time_last_log = time.perf_counter() - seconds


def build_instruct_validator(
    *, job_config: JobConfig, split: ExampleSplit, template: Template, **kwargs: Any
) -> InstructValidator:
    """Build the validator of an instruction data set; ``kwargs`` are upstream's arguments."""
    reader = {name: kwargs[name] for name in ("dp_world_size", "dp_rank", "tokenizer")}
    loader = build_validation_loader(
        job_config=job_config, split=split, template=template, **reader
    )
    return InstructValidator(loader, job_config, **kwargs)


def build_validation_loader(
    *, job_config: JobConfig, split: ExampleSplit, **of_dataset: Any
) -> ResizableDataloader:
    """Build the loader of validation examples; DataError for less than a batch.

    Packed like training, which changes no loss: no example is left out then, and batches are filled
    with padding.
    """
    validation, steps = job_config.validation, job_config.validation.steps
    dataset = read_dataset(
        validation_sources(job_config),
        seq_len=validation.seq_len,
        infinite=steps != -1,
        section="validation",
        split=split,
        packing=job_config.data.packing,
        **of_dataset,
    )
    if not job_config.data.packing:
        return validation_loader(dataset, validation)
    n_readers = dataset.dp_world_size * max(1, validation.dataloader.num_workers)
    at_once = validation.local_batch_size * n_readers
    packed = PackedOnce(dataset, at_once, None if steps == -1 else steps * at_once)
    return validation_loader(packed, validation)
