"""A run on pictures stopped and resumed equals, bit for bit, one that never stopped.

Pictures come from a file and are changed at random and mixed. All are read 2.6 times, and the run
stops within the second time. The ranks are emulated.
"""

import pytest
from image_runs import KINDS, SCHEDULES, image_scenario
from launcher import EMULATED, asked_for, assert_goes_on, run_scenarios
from methods import ROW, STEPS
from saving import SAVED, resumed_from

from tests.tools.make_assets.pictures import rows, write_parquet
from tests.torchtitan.helpers.image_models import CLASSES, SIZE

pytest.importorskip("transformers")
pytest.importorskip("torchvision", reason="torchvision is not installed: the extra vision has it")

STOPPED_AT = 8  # in the ramp
CASES = [
    pytest.param(
        kind,
        schedule,
        marks=[] if (kind, schedule) == ("convnextv2", "1F1B") else [pytest.mark.long],
    )
    for kind in KINDS
    for schedule in SCHEDULES
]


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume_images")
    pictures = write_parquet(folder / "pictures.parquet", list(rows(CLASSES, 8, SIZE)))
    scenarios = []
    for kind, schedule in asked_for(request, "kind", "schedule"):
        name = f"{kind} {schedule}"
        settings = {
            "training__dataset_path": pictures,
            "training__steps": STEPS,
            "training__global_batch_size": 16,
            "vision__augmentation": "padded_crop",
            "vision__mixup": 0.5,
            "vision__label_smoothing": 0.1,
            "parallelism__pipeline_parallel_degree": 2,
            "parallelism__pipeline_parallel_microbatch_size": 2,
            "parallelism__pipeline_parallel_schedule": schedule,
            **SAVED,
            **EMULATED,
            **ROW["timelyfreeze+apf"].arguments,
            "freezing__first_stage": "per_tensor",  # as the paper's preset
        }
        from_checkpoint = resumed_from(folder / name / "checkpoint" / f"step-{STOPPED_AT}")
        more = {"module": "tiny_images", "fake_clock": True, "save_at": [STOPPED_AT]}
        scenarios += [
            image_scenario(name, kind, more=more, **settings),
            image_scenario(
                f"{name} resumed",
                kind,
                more={**more, "save_at": [], "fixed_weights": False, "after": name},
                **settings,
                **from_checkpoint,
            ),
        ]
    return run_scenarios(folder, 1, scenarios, timeout_s=900)


@pytest.mark.parametrize(("kind", "schedule"), CASES)
def test_resumed_run_equals_undisturbed(runs, kind, schedule):
    name = f"{kind} {schedule}"
    assert_goes_on(runs[name], runs[f"{name} resumed"], STOPPED_AT)
    ranks = runs[name]
    frozen = [any(mask) for seen in ranks for step, _, masks in seen["masks"] if step > STOPPED_AT
              for mask in masks.values()]  # fmt: skip
    assert any(frozen), "nothing was frozen that could be forgotten"
