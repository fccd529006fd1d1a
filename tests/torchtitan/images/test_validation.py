"""Validation on pictures in one process: which pictures, which means, how often."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchtitan.tools.utils as titan_tools
from torch import Tensor, nn

from tests.tools.make_assets.pictures import write_folder
from tests.torchtitan.helpers.job_configs import make_job_config
from torchtitan.data.sources import ALL_EXAMPLES, ExampleSplit
from torchtitan.images.sources import ImagePlace, read_images
from torchtitan.images.transforms import ImageTransform
from torchtitan.images.validation import ImageValidator, build_image_validator

pytest.importorskip("torchvision", reason="torchvision is not installed: the extra vision has it")

CLASSES, PER_CLASS = 7, 3
N = CLASSES * PER_CLASS


class Processor:
    """What the validator uses of a metrics processor."""

    def __init__(self) -> None:
        self.ntokens_since_last_log = 5
        self.time_last_log = 0.0
        self.logged: list[tuple[int, float, dict[str, float], int]] = []

    def log_held_out(self, step: int, parts: list[tuple[int, float]]) -> None:
        self.parts = parts

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, float]) -> None:
        self.logged.append((step, loss, extra_metrics, self.ntokens_since_last_log))


class Model(nn.Module):
    """Guesses by the pixels; never in training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.guess = nn.Linear(3 * 16 * 16, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        assert not self.training
        assert not torch.is_grad_enabled()
        return self.guess(pictures.flatten(1))


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(titan_tools, "device_type", "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("pictures"), CLASSES, PER_CLASS, size=16)


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.3)


def build(
    folder: Path, processor: Any, split: ExampleSplit = ALL_EXAMPLES, **changes: Any
) -> ImageValidator:
    values = {
        "training__dataset": "images",
        "training__dataset_path": str(folder),
        "validation__dataset": "images",
        "validation__local_batch_size": 7,
        "validation__steps": -1,
        "vision__image_size": 16,
        "vision__augmentation": "none",
        **changes,
    }
    return build_image_validator(
        job_config=make_job_config(**values),
        dp_world_size=1,
        dp_rank=0,
        split=split,
        parallel_dims=SimpleNamespace(
            dp_enabled=False, cp_enabled=False, pp_enabled=False, dp_cp_enabled=False
        ),
        loss_fn=smoothed,
        validation_context=nullcontext,
        maybe_enable_amp=nullcontext(),
        metrics_processor=processor,
    )


def by_hand(folder: Path, model: Model, indices: Any) -> tuple[float, float, float]:
    """Mean loss and shares, from pictures taken one by one and places counted."""
    images = read_images(ImagePlace(str(folder), "key"))
    transform = ImageTransform(16, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    losses, places = [], []
    for index in indices:
        label = int(images.labels[index])
        with torch.no_grad():
            logits = model(transform(images.picture(index))[None])[0].double()
        losses.append(float(logits.logsumexp(0) - logits[label]))
        places.append(int((logits > logits[label]).sum()))
    n = len(losses)
    return sum(losses) / n, sum(p < 1 for p in places) / n, sum(p < 5 for p in places) / n


def test_what_is_logged_is_the_mean_over_all_pictures(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    processor, model = Processor(), Model()
    validator = build(folder, processor)
    with caplog.at_level("INFO"):
        validator.validate([model], 4)
    loss, top1, top5 = by_hand(folder, model.eval(), range(N))
    assert 0 < top1 < top5 < 1  # a guess that says something
    ((step, logged, extra, n_pictures),) = processor.logged
    assert step == 4
    assert logged == pytest.approx(loss, rel=1e-5)
    assert extra == pytest.approx(
        {"validation_metrics/top1": top1, "validation_metrics/top5": top5}
    )
    assert n_pictures == N
    assert processor.ntokens_since_last_log == 5  # those of training
    assert f"top-1 {top1:.2%}, top-5 {top5:.2%} of {N} pictures" in caplog.text


def test_every_validation_has_the_same_answer_and_leaves_the_model_training(folder: Path) -> None:
    processor, model = Processor(), Model()
    validator = build(folder, processor, validation__steps=2)
    for step in (1, 2):
        validator.validate([model], step)
        assert model.training
    first, second = processor.logged
    assert first[1:] == second[1:]
    assert first[3] == 14


def test_held_out_pictures_alone_are_looked_at(folder: Path) -> None:
    processor, model = Processor(), Model()
    split = ExampleSplit(1 / 3, held_out=True)
    build(folder, processor, split, data__validation_fraction=1 / 3).validate([model], 1)
    loss, _, _ = by_hand(folder, model.eval(), split.indices(N))
    assert processor.logged[0][1] == pytest.approx(loss, rel=1e-5)
    assert processor.logged[0][3] == 7
