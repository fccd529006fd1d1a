import logging
from pathlib import Path

import pytest

from torchtitan.freezing.report.loss_curve import LossCurve
from torchtitan.freezing.report.output_guard import OutputGuard

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
def test_a_full_disk_is_told_once_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guard = OutputGuard(tmp_path)
    curve = LossCurve(tmp_path / "losses.csv")
    curve._path = FULL
    for step in (1, 2):
        with guard.writing():
            curve.add_train(step, 1.0, 2.0)
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert str(tmp_path) in record.getMessage()
    assert "No space left on device" in record.getMessage()


def test_what_is_not_the_file_systems_fault_is_not_swallowed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ours"), OutputGuard(tmp_path).writing():
        raise ValueError("ours")
