"""One folder per run, under a name that says what ran."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from timelyfreeze.exchange import Exchange
from torchtitan.freezing.config import JobConfig


def make_run_folder(job_config: JobConfig, *, create: bool) -> Path:
    """Agree on the run's folder over all ranks, ``<dump_folder>/<save_tb_folder>/<time>_<what>``.

    Args:
        job_config: Names the place, the schedule and the method.
        create: Whether this rank makes the folder.

    Returns:
        A folder that no earlier run has used.
    """
    place = Path(job_config.job.dump_folder) / job_config.metrics.save_tb_folder
    return (
        place / Exchange().broadcast(_free_name(job_config, place))
        if not create
        else _made(place / Exchange().broadcast(_free_name(job_config, place)))
    )


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _free_name(job_config: JobConfig, place: Path) -> str:
    what = [datetime.now().strftime("%Y%m%d-%H%M%S")]
    if job_config.job.config_file:
        what.append(Path(job_config.job.config_file).stem)
    if job_config.parallelism.pipeline_parallel_degree > 1:
        what.append(job_config.parallelism.pipeline_parallel_schedule)
    what.append(job_config.freezing.method)
    name = "_".join(what)
    count = 1
    while (place / (name if count == 1 else f"{name}_{count}")).exists():
        count += 1
    return name if count == 1 else f"{name}_{count}"
