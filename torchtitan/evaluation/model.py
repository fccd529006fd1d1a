"""What is scored: a Hugging Face folder, or a run, whose weights are exported first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from timelyfreeze.records.scores import Scores

SETTINGS = "settings.json"
# Writes the checkpoint of a run at a step as a Hugging Face folder, and returns the folder.
Exporter = Callable[[Path, int], Path]


@dataclass(frozen=True)
class Model:
    """A model to be scored: its Hugging Face folder, and the run and step that it comes from."""

    folder: Path
    run: Path | None = None
    step: int | None = None


def unscored(model: Model, device: str, dtype: str, **others: Any) -> Scores:
    """Return the scores of a model that has not been asked anything yet."""
    import torch

    return Scores(
        model=str(model.folder),
        step=model.step,
        dtype=dtype,
        device="cpu" if device == "cpu" else torch.cuda.get_device_name(device),
        evaluated_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        benchmarks={},
        **others,
    )


def export(run: Path, step: int) -> Path:
    """Export a checkpoint of a run; the import is late because it loads the trainer's model."""
    from torchtitan.hf.export import export_run
    from torchtitan.vision.export import FORMS

    return export_run(run, step, forms=FORMS)


def find_model(path: Path, step: int | None = None, exporter: Exporter = export) -> Model:
    """Return the model of a Hugging Face folder, or of a run at ``path``, exported if need be."""
    if _is_hf_folder(path):
        if step is not None:
            raise ValueError(
                f"--step is {step}, but {path} is a Hugging Face folder, which holds one model; "
                "leave it out, or name a run"
            )
        return Model(path)
    # Imported late: --help need not wait for torch.
    from torchtitan.checkpoints.finished import checkpoint_folder, chosen_step, read_run_settings

    run = _find_run(path)
    checkpoints = checkpoint_folder(run, read_run_settings(run))
    chosen, _ = chosen_step(checkpoints, step)
    exported = run / f"hf_step-{chosen}"
    return Model(exported if _is_hf_folder(exported) else exporter(run, chosen), run, chosen)


def _is_hf_folder(path: Path) -> bool:
    return (path / "config.json").is_file()


def _find_run(path: Path) -> Path:
    """Return the folder of the only run at ``path`` or below it."""
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; name a run or a Hugging Face folder")
    found = [path] if (path / SETTINGS).is_file() else []
    found = found or sorted(file.parent for file in path.rglob(SETTINGS))
    if not found:
        raise ValueError(
            f"{path} has neither config.json, as a Hugging Face folder, nor {SETTINGS}, as a run"
        )
    if len(found) > 1:
        raise ValueError(f"{path} has {len(found)} runs; name one: {', '.join(map(str, found))}")
    return found[0]
