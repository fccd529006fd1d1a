"""Scores an image classifier on the validation pictures of its run: each of them, once."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from timelyfreeze.files import read_object
from timelyfreeze.records.scores import Scores
from torchtitan.evaluation.model import Model, unscored

if TYPE_CHECKING:
    from torchtitan.vision.model import VisionModel

_TASK = "pictures"
_SECTIONS = ("model", "training", "validation", "data", "vision")
_BATCH_SIZE = 64


def reads_pictures(folder: Path) -> bool:
    """Tell whether a Hugging Face folder holds an image classifier."""
    from torchtitan.freezing.config import IMAGE_MODELS

    return read_object(folder / "config.json").get("model_type") in IMAGE_MODELS


def score_pictures(model: Model, device: str, dtype: str, batch_size: int | None = None) -> Scores:
    """Return top-1, top-5 and the mean cross-entropy over all validation pictures of a run."""
    # Imported late: --help need not wait for torch.
    import torch

    from torchtitan.checkpoints.finished import read_run_settings
    from torchtitan.freezing.checks.data import validation_split
    from torchtitan.freezing.config import config_of_run
    from torchtitan.images.settings import read_validation_images, transform_of, validation_place
    from torchtitan.images.sources import check_labels
    from torchtitan.images.validation import Scores as Sums
    from torchtitan.images.validation import scores_of

    if model.run is None:
        raise ValueError(
            f"{model.folder} does not say which pictures to score; name the run it was exported of"
        )
    config = config_of_run(read_run_settings(model.run), *_SECTIONS)
    examples, classes = read_validation_images(config)
    check_labels(examples, classes)
    rows = validation_split(config).indices(len(examples))
    transform = transform_of(config, is_training=False)
    classifier = _load(model.folder, config.model.name).to(device, getattr(torch, dtype))
    sums = Sums()
    size = batch_size or _BATCH_SIZE
    with torch.inference_mode():
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            pictures = torch.stack([transform(examples.picture(int(row)), 0) for row in part])
            labels = torch.from_numpy(examples.labels[part]).to(device)
            sums += scores_of(classifier(pictures.to(device)), labels)
    n = sums.pictures
    means = {"top1": sums.top1 / n, "top5": sums.top5 / n, "loss": sums.loss / n, "pictures": n}
    return unscored(
        model,
        device,
        dtype,
        source=validation_place(config).path,
        limit=None,
        versions={name: version(name) for name in ("torch", "transformers")},
        further={_TASK: means},
        tasks=_TASK,
    )


def _load(folder: Path, kind: str) -> VisionModel:
    import torch.distributed.checkpoint as dcp

    from torchtitan.vision.adapter import VisionAdapter
    from torchtitan.vision.library import described, folder_settings
    from torchtitan.vision.model import VisionModel

    args = described(kind, folder_settings(kind, folder))
    classifier = VisionModel(args).eval()
    adapter = VisionAdapter(args, str(folder))
    stored = adapter.to_hf(classifier.state_dict())
    dcp.load(stored, storage_reader=adapter.get_hf_storage_reader(str(folder)), no_dist=True)
    classifier.load_state_dict(adapter.from_hf(stored))
    return classifier
