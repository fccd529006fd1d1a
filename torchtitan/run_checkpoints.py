"""The finished checkpoints of a run, and where they lie."""

from __future__ import annotations

import re
from pathlib import Path

from torchtitan.freezing.config import JobConfig
from torchtitan.hf_folder import INDEX_FILE

METADATA = ".metadata"


def checkpoint_folder(run: Path, job_config: JobConfig) -> Path:
    """Return where a run's checkpoints lie beside it, also if both were moved together.

    Args:
        run: The run's own folder, ``<dump_folder>/<save_tb_folder>/<name>``.
        job_config: The run's settings.
    """
    depth = len(Path(job_config.metrics.save_tb_folder).parts)
    return run.resolve().parents[depth] / job_config.checkpoint.folder


def finished_steps(checkpoints: Path) -> dict[int, Path]:
    """Return the folders of finished checkpoints by their step; what is written last is there."""
    found = {}
    for folder in checkpoints.glob("step-*"):
        match = re.fullmatch(r"step-(\d+)", folder.name)
        if match and ((folder / METADATA).is_file() or (folder / INDEX_FILE).is_file()):
            found[int(match[1])] = folder
    return found
