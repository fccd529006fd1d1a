"""Scores an image classifier on all validation pictures of its run, once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from timelyfreeze.files import read_object

if TYPE_CHECKING:
    from torchtitan.vision.model import VisionModel

_SECTIONS = ("model", "training", "validation", "data", "vision")


def reads_pictures(folder: Path) -> bool:
    """Tell whether a Hugging Face folder holds an image classifier."""
    from torchtitan.settings import IMAGE_MODELS

    return read_object(folder / "config.json").get("model_type") in IMAGE_MODELS


def score_pictures(
    run: Path, folder: Path, device: str, dtype: str, batch_size: int
) -> tuple[str, dict[str, float]]:
    """Return where a run's validation pictures are; top-1, top-5 and mean loss over all of them."""
    # Imported late: --help need not wait for torch.
    import torch

    from torchtitan.checkpoints.finished import read_run_settings
    from torchtitan.freezing.checks.data import validation_split
    from torchtitan.images.settings import read_validation_images, transform_of, validation_place
    from torchtitan.images.sources import check_labels
    from torchtitan.images.validation import scores_of
    from torchtitan.settings import config_of_run

    config = config_of_run(read_run_settings(run), *_SECTIONS)
    examples, classes = read_validation_images(config)
    check_labels(examples, classes)
    rows = validation_split(config).indices(len(examples))
    transform = transform_of(config, is_training=False)
    classifier = _load(folder, config.model.name).to(device, getattr(torch, dtype))
    sums = torch.zeros(4, dtype=torch.float64)
    with torch.inference_mode():
        for start in range(0, len(rows), batch_size):
            part = rows[start : start + batch_size]
            pictures = torch.stack([transform(examples.picture(int(row)), 0) for row in part])
            labels = torch.from_numpy(examples.labels[part]).to(device)
            sums += scores_of(classifier(pictures.to(device)), labels)
    loss, top1, top5, n = sums.tolist()
    means = {"top1": top1 / n, "top5": top5 / n, "loss": loss / n, "pictures": n}
    return validation_place(config).path, means


def _load(folder: Path, kind: str) -> VisionModel:
    import torch.distributed.checkpoint as dcp

    from torchtitan.vision.adapter import VisionAdapter
    from torchtitan.vision.model import VisionModel, described, folder_settings

    args = described(kind, folder_settings(kind, folder))
    classifier = VisionModel(args).eval()
    adapter = VisionAdapter(args, str(folder))
    stored = adapter.to_hf(classifier.state_dict())
    dcp.load(stored, storage_reader=adapter.get_hf_storage_reader(str(folder)), no_dist=True)
    classifier.load_state_dict(adapter.from_hf(stored))
    return classifier
