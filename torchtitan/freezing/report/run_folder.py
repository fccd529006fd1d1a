"""A folder per run, named by its content."""

from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from itertools import count
from pathlib import Path

from timelyfreeze.files import make_new
from timelyfreeze.runtime import Exchange
from torchtitan.checkpoints.finished import SETTINGS_FILE, read_run_settings
from torchtitan.settings import JobConfig

REPORT = "report.txt"


def make_run_folder(job_config: JobConfig, *, create: bool) -> Path:
    """Return a new folder, ``<dump_folder>/<save_tb_folder>/<time>_<what>``.

    Made by the writing process, which tells its name to the others.
    """
    place = Path(job_config.job.dump_folder) / job_config.metrics.save_tb_folder
    name = describe(job_config) if create else None
    if name is not None:
        with suppress(OSError):  # what takes no folder takes no file either, which is told
            name = make_new(place, name).name
    return place / next(name for name in Exchange().all_gather(name) if name is not None)


def describe(job_config: JobConfig) -> str:
    """Return a name of the moment, the configuration file, the schedule and the method."""
    words = [datetime.now().strftime("%Y%m%d-%H%M%S")]
    if job_config.job.config_file:
        words.append(Path(job_config.job.config_file).stem)
    if job_config.parallelism.pipeline_parallel_degree > 1:
        words.append(job_config.parallelism.pipeline_parallel_schedule)
    return "_".join([*words, job_config.freezing.method])


def last_report(job_config: JobConfig) -> Path | None:
    """Return the short report of the newest run with the same checkpoint folder."""
    place = Path(job_config.job.dump_folder) / job_config.metrics.save_tb_folder
    runs = (file for file in place.glob(f"*/{SETTINGS_FILE}") if _saved_in(job_config, file.parent))
    newest = max(runs, key=lambda file: file.stat().st_mtime, default=None)
    report = None if newest is None else newest.with_name(REPORT)
    return report if report is not None and report.exists() else None


def _saved_in(job_config: JobConfig, run: Path) -> bool:
    try:
        checkpoint = read_run_settings(run)["checkpoint"]
        return bool(checkpoint["enable"] and checkpoint["folder"] == job_config.checkpoint.folder)
    except (ValueError, LookupError, TypeError):
        return False


def number_former(folder: Path, names: Iterable[str]) -> None:
    """Number files whose names are wanted again: ``plan_1.json`` is oldest."""
    files = [folder / name for name in names if (folder / name).exists()]
    numbered = ([f.with_stem(f"{f.stem}_{n}") for f in files] for n in count(1))
    free = next(names for names in numbered if not any(name.exists() for name in names))
    for file, name in zip(files, free, strict=True):
        file.rename(name)
