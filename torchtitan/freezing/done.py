"""A run that is called again once all its steps are done."""

from __future__ import annotations

from pathlib import Path

from torchtitan.checkpoints.finished import read_run_settings
from torchtitan.freezing.checks import start_of
from torchtitan.freezing.config import JobConfig

REPORT = "report.txt"


def done_run(config: JobConfig) -> str:
    """Return what is said of a run that is done: at which step, and its report if it has one."""
    start = start_of(config)
    assert start is not None  # the caller saw to it
    report = _last_report(config)
    return (
        f"This run is done at step {start.step} (training.steps is {config.training.steps}, the "
        f"checkpoint {str(start.folder)!r}); with more training.steps it goes on"
        + ("" if report is None else f"\n\n{report.read_text()}\nreport: {report}")
    )


def _last_report(config: JobConfig) -> Path | None:
    """Return the newest report beside the checkpoints that a run of theirs has written."""
    place = Path(config.job.dump_folder) / config.metrics.save_tb_folder
    reports = (path for path in place.glob(f"*/{REPORT}") if _saved_in(config, path.parent))
    return max(reports, key=lambda path: path.stat().st_mtime, default=None)


def _saved_in(config: JobConfig, run: Path) -> bool:
    try:
        saved = read_run_settings(run)["checkpoint"]
    except (ValueError, LookupError):
        return False
    return bool(saved["enable"] and saved["folder"] == config.checkpoint.folder)
