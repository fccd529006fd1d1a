"""An image classifier, trained, exported and scored as transformers' own model would be."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.tools.make_assets.pictures import pixels, write_folder
from tests.torchtitan.helpers.image_models import KINDS, SETTINGS, SIZE, args_of, library_model
from tests.torchtitan.helpers.job_configs import make_job_config
from torchtitan.evaluation.command import main
from torchtitan.vision.export_command import main as export
from torchtitan.vision.model import FLAVORS, VisionModel

pytest.importorskip("torchvision", reason="torchvision is not installed: the extra vision has it")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CLASSES, EACH = 7, 11  # no whole number of batches
MEAN, STD = [0.5, 0.25, 0.5], [0.25, 0.5, 0.5]


def pictures_of(numbers: range) -> tuple[Tensor, Tensor]:
    found = [(pixels(label, n, SIZE), label) for label in range(CLASSES) for n in numbers]
    shown = torch.stack([torch.from_numpy(picture) for picture, _ in found]).permute(0, 3, 1, 2)
    colors = [torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD)]
    return (shown / 255 - colors[0]) / colors[1], torch.tensor([label for _, label in found])


@pytest.fixture
def run(tmp_path: Path, request: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of three steps, as it lies on a disk."""
    kind = request.param
    monkeypatch.setitem(FLAVORS[kind], "tiny", SETTINGS[kind])
    classifier = VisionModel(args_of(kind), library_model(kind, num_labels=CLASSES))
    classifier.output = torch.nn.Linear(classifier.output.in_features, CLASSES)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=1e-3)
    pictures, labels = pictures_of(range(4))
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(classifier(pictures), labels).backward()
        optimizer.step()
    config = make_job_config(
        job__dump_folder=str(tmp_path / "outputs"),
        model__name=kind,
        model__flavor="tiny",
        training__dataset="images",
        training__dataset_path=str(write_folder(tmp_path / "train", CLASSES, 1, size=SIZE)),
        validation__dataset="images",
        validation__dataset_path=str(write_folder(tmp_path / "held", CLASSES, EACH, size=SIZE)),
        vision__image_size=SIZE,
        vision__augmentation="padded_crop",
        vision__mean=MEAN,
        vision__std=STD,
    )
    folder = tmp_path / "outputs" / "tb" / "run"
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps(config.to_dict()))
    checkpoint = tmp_path / "outputs" / "checkpoint" / "step-3"
    dcp.save(classifier.state_dict(), checkpoint_id=checkpoint, no_dist=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("run", KINDS, indirect=True)
def test_scores_of_what_was_exported_are_those_of_the_library(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export([str(run)]) == 0
    exported = run / "hf_step-3"
    library = transformers.AutoModelForImageClassification.from_pretrained(exported).eval()
    pictures, labels = pictures_of(range(EACH))
    with torch.no_grad():
        logits = library(pictures).logits
    ranks = (logits > logits.gather(1, labels[:, None])).sum(1)
    assert main([str(run), "--device", "cpu", "--batch-size", "10"]) == 0
    scores = json.loads((run / "scores.json").read_text())
    assert (scores["model"], scores["step"], scores["tasks"]) == (str(exported), 3, "pictures")
    found = scores["further"]["pictures"]
    assert found == {
        "top1": int((ranks < 1).sum()) / len(labels),
        "top5": int((ranks < 5).sum()) / len(labels),
        "loss": pytest.approx(cross_entropy(logits, labels).item(), rel=1e-5),
        "pictures": CLASSES * EACH,
    }
    assert 0 < found["top1"] < found["top5"] <= 1
    assert f"| pictures | top1 | {found['top1']:.4g} |" in capsys.readouterr().out


@pytest.mark.parametrize("run", KINDS[:1], indirect=True)
def test_what_cannot_be_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint that was not exported before is exported; a folder alone has no pictures."""
    assert main([str(run), "--limit", "3"]) == 2
    assert "leave out --limit" in capsys.readouterr().err
    assert main([str(run / "hf_step-3")]) == 2
    assert "does not say which pictures to score; name the run" in capsys.readouterr().err
