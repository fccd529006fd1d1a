"""Validation on pictures under every schedule has the answer of one process."""

import pytest
import torch
import torchtitan.tools.utils as titan_tools
from launcher import SCHEDULES, run_scenarios

pytest.importorskip("torchvision", reason="torchvision is not installed: the extra vision has it")

from image_validation import CLASSES, SIZE, Logged, build_validator, modules

from tests.tools.make_assets.pictures import write_folder

ALONE = ("GPipe", "1F1B")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return str(write_folder(tmp_path_factory.mktemp("pictures"), CLASSES, 8, size=SIZE))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, pictures):
    scenarios = [
        {
            "name": schedule,
            "schedule": schedule,
            "stages": 1 if schedule in ALONE else 2,
            "pictures": pictures,
        }
        for schedule in SCHEDULES
    ]
    folder = tmp_path_factory.mktemp("runs")
    return run_scenarios(folder, 2, scenarios, script="image_validation.py")


@pytest.fixture(scope="module")
def expected(pictures):
    logged = Logged()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(titan_tools, "device_type", "cpu")
        build_validator(pictures, logged).validate([torch.nn.Sequential(*modules(1))], 3)
    return logged.given


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_rank_with_the_last_stage_has_the_answer_of_one_process(ranks, expected, schedule):
    with_loss = [seen for seen in ranks[schedule] if seen.pop("has_loss")]
    (seen,) = with_loss
    assert seen["step"] == 3
    assert seen["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert seen["extra_metrics"] == expected["extra_metrics"]
    assert 0 < expected["extra_metrics"]["validation_metrics/top1"] < 1
    others = [other for other in ranks[schedule] if other is not seen]
    assert [(other["loss"], "extra_metrics" in other) for other in others] == [(-1.0, False)]
