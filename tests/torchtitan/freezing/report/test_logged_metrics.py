"""The tags of a logged step, and that what is not known has none."""

from types import SimpleNamespace

import pytest

from timelyfreeze.control.collected import CollectedMetrics
from timelyfreeze.settings.phases import Phase
from torchtitan.freezing.report.logged_metrics import PHASE_NUMBERS, logged_metrics


def controller(phase: Phase) -> SimpleNamespace:
    return SimpleNamespace(phase=phase, expected_stage_ratios=lambda: {0: 0.5, 1: 0.25})


def test_what_is_known_has_a_tag() -> None:
    metrics = CollectedMetrics(
        {Phase.STABLE: (90.0, 110.0, 100.0), Phase.RAMP: (7.0,)},
        {0: 0.4},
        0.3,
        score_ms_per_step=1.5,
        score_bytes=2**20,
        policy={"frozen_layers": 2.0},
        drift=1.25,
    )
    assert logged_metrics(controller(Phase.STABLE), metrics, 80.0) == {
        "freezing/phase": 4.0,
        "freezing/average_freeze_ratio": 0.3,
        "freezing_expected_ratio/stage_0": 0.5,
        "freezing_expected_ratio/stage_1": 0.25,
        "freezing_actual_ratio/stage_0": 0.4,
        "freezing_policy/frozen_layers": 2.0,
        "freezing_score/time(ms)": 1.5,
        "freezing_score/memory(MiB)": 1.0,
        "batch_time/measured(ms)": 100.0,
        "batch_time/predicted(ms)": 80.0,
        "batch_time/drift": 1.25,
    }


def test_what_is_not_known_has_none() -> None:
    metrics = CollectedMetrics({Phase.RAMP: (7.0,)}, {}, 0.0)
    assert logged_metrics(controller(Phase.WARMUP), metrics, None) == {
        "freezing/phase": 0.0,
        "freezing/average_freeze_ratio": 0.0,
        "freezing_expected_ratio/stage_0": 0.5,
        "freezing_expected_ratio/stage_1": 0.25,
    }


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_has_a_number_of_its_own(phase: Phase) -> None:
    assert list(PHASE_NUMBERS.values()).count(PHASE_NUMBERS[phase]) == 1
