"""Validation on pictures: held-out loss, top-1 and top-5, on every schedule."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchtitan.tools.logging import logger

from torchtitan.data.sources import ALL_EXAMPLES, ExampleSplit
from torchtitan.data.validation import BatchValidator, counted_apart
from torchtitan.images.loader import build_validation_dataloader
from torchtitan.settings import JobConfig

# What upstream logs where the last stage is not.
_ELSEWHERE = -1.0


class ImageValidator(BatchValidator):
    """Validates on pictures: loss, without smoothing, and top-1 and top-5 as means over all."""

    def __init__(
        self, loader: Any, job_config: JobConfig, metrics_processor: Any, **kwargs: Any
    ) -> None:
        self._outputs = _Outputs(kwargs.get("pp_schedule"), kwargs["loss_fn"])
        if kwargs.get("pp_schedule") is not None:
            kwargs["pp_schedule"] = self._outputs
        kwargs["loss_fn"] = self._outputs.loss
        super().__init__(loader, job_config, metrics_processor, **kwargs)

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Evaluate the model and log the results; a collective call at the same steps."""
        scores = torch.zeros(4, dtype=torch.float64)
        parts: list[tuple[int, float]] = []
        with counted_apart(self._metrics_processor) as processor:
            for input_dict, labels in self._batches():
                processor.ntokens_since_last_log += len(labels)
                self._evaluate(model_parts, step, input_dict, labels)
                logits = self._outputs.take()
                if logits is not None:
                    of_batch = scores_of(logits, labels.to(logits.device))
                    scores += of_batch
                    parts += self._gathered([(len(labels), float(of_batch[0]) / len(labels))])
            loss, top1, top5, n = map(self._of_all_replicas, scores)
            if not n:
                processor.log_validation(loss=_ELSEWHERE, step=step)
                return
            top1, top5 = top1 / n, top5 / n
            processor.log_held_out(step, parts)
            logger.info(f"validation: top-1 {top1:.2%}, top-5 {top5:.2%} of {n:.0f} pictures")
            further = {"validation_metrics/top1": top1, "validation_metrics/top5": top5}
            processor.log_validation(loss=loss / n, step=step, extra_metrics=further)

    def post_dataloading_process(
        self, input_dict: dict[str, Tensor], labels: Tensor, model_parts: list[nn.Module]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Any]]:
        """Hand on pictures and labels; no masks belong to them."""
        return input_dict["input"], labels, {}, {}


class _Outputs:
    """Keeps the last stage's outputs, since upstream's validator asks for its loss alone."""

    def __init__(self, schedule: Any, loss_fn: Any) -> None:
        self._schedule = schedule
        self._loss_fn = loss_fn
        self._logits: Tensor | None = None

    def eval(self, *args: Any, **kwargs: Any) -> None:
        self._logits = self._schedule.eval(*args, return_outputs=True, **kwargs)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        self._logits = logits
        return self._loss_fn(logits, labels)

    def take(self) -> Tensor | None:
        """Return the logits of the batch, [B, C]; None where the last stage is not."""
        logits, self._logits = self._logits, None
        return logits


def build_image_validator(
    *, job_config: JobConfig, split: ExampleSplit = ALL_EXAMPLES, **kwargs: Any
) -> ImageValidator:
    """Build the validator of pictures; ``kwargs`` are upstream's arguments."""
    place = {name: kwargs[name] for name in ("dp_world_size", "dp_rank")}
    loader = build_validation_dataloader(job_config=job_config, split=split, **place)
    return ImageValidator(loader, job_config, **{"tokenizer": None, **kwargs})


def scores_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return sums over logits, [B, C]: loss, hits in the first and first five, pictures.

    float64 [4]. The loss has no label smoothing; with fewer than six classes all are among five.
    """
    logits = logits.float()
    hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
    loss = functional.cross_entropy(logits, labels, reduction="sum")
    sums = (loss, hits[:, 0].sum(), hits.sum(), len(labels))
    return torch.tensor([float(one) for one in sums], dtype=torch.float64)
