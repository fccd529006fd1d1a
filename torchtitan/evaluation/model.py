"""What is scored: a Hugging Face folder, or a run, whose weights are exported first."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
EXPORT = SCRIPTS / "export_hf.sh"
SUMMARY, SETTINGS = "summary.json", "settings.json"

# Runs a command and returns what it wrote to its standard output.
Runner = Callable[[Sequence[str]], str]


@dataclass(frozen=True)
class Model:
    """A model to be scored.

    Attributes:
        folder: Its Hugging Face folder.
        run: The folder of the run that it comes from, or None.
        step: The training step of its weights, or None.
    """

    folder: Path
    run: Path | None = None
    step: int | None = None


def run_command(command: Sequence[str]) -> str:
    """Run ``command``; its messages go to the terminal.

    Raises:
        ValueError: If it fails.
    """
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.stderr.write(done.stdout)
        raise ValueError(f"{' '.join(command)} ended with status {done.returncode}")
    return done.stdout


def find_model(path: Path, step: int | None = None, runner: Runner = run_command) -> Model:
    """Return the model that ``path`` stands for, exported where it is a run.

    Args:
        path: A Hugging Face folder, the folder of a run, or the dump folder of a single run.
        step: The run's checkpoint; None for the last.
        runner: Runs ``export_hf.sh``, whose last line of output is the exported folder. What was
            exported before is not exported again.

    Raises:
        ValueError: If ``path`` is neither, the run has no such checkpoint, or the export fails.
    """
    if is_hf_folder(path):
        if step is not None:
            raise ValueError(
                f"--step is {step}, but {path} is a Hugging Face folder, which holds one model; "
                "leave it out, or name a run"
            )
        return Model(path)
    # Imported late: --help need not wait for torch.
    from torchtitan.checkpoints.finished import checkpoint_folder, finished_steps, read_run_settings

    run = find_run(path)
    checkpoints = checkpoint_folder(run, read_run_settings(run))
    steps = sorted(finished_steps(checkpoints))
    if not steps:
        raise ValueError(
            f"{checkpoints} has no finished checkpoint to score; train with checkpoint.enable"
        )
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps))
        raise ValueError(f"--step is {step}; the run has checkpoints of steps {known}")
    chosen = steps[-1] if step is None else step
    exported = run / f"hf_step-{chosen}"
    if is_hf_folder(exported):
        return Model(exported, run, chosen)
    if not EXPORT.exists():
        raise ValueError(
            f"{path} is a run, and there is no {EXPORT.name} beside this script to export it; "
            "name a Hugging Face folder"
        )
    lines = runner([str(EXPORT), str(run), str(chosen)]).split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    folder = Path(last)
    if not last or not is_hf_folder(folder):
        raise ValueError(
            f"the last line of {EXPORT.name} is {last!r}; it must name the folder that it exported"
        )
    return Model(folder, run, chosen)


def is_hf_folder(path: Path) -> bool:
    """Return whether ``path`` holds a model that transformers can load."""
    return (path / "config.json").is_file()


def find_run(path: Path) -> Path:
    """Return the folder of the run at ``path`` or below it.

    Raises:
        ValueError: If there is none, or more than one.
    """
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; name a run or a Hugging Face folder")
    if (path / SUMMARY).is_file() or (path / SETTINGS).is_file():
        return path
    found = sorted(file.parent for file in path.rglob(SETTINGS))
    if not found:
        raise ValueError(
            f"{path} has neither config.json, as a Hugging Face folder, nor {SETTINGS}, as a run"
        )
    if len(found) > 1:
        raise ValueError(f"{path} has {len(found)} runs; name one: {', '.join(map(str, found))}")
    return found[0]
