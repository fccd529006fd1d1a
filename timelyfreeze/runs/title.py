"""What a run is called above its pictures."""

from __future__ import annotations

import json
from pathlib import Path

FILE = "settings.json"


def run_title(run_folder: Path) -> str:
    """Return method, schedule, ranks and model of a run; the folder's name if it has no settings.

    Raises:
        ValueError: If its settings are no run's.
    """
    path = run_folder / FILE
    if not path.exists():
        return run_folder.resolve().name
    try:
        settings = json.loads(path.read_text())
        parallelism, model = settings["parallelism"], settings["model"]
        method = settings["freezing"]["method"]
        words = ["without freezing" if method == "none" else str(method)]
        n_ranks = int(parallelism["pipeline_parallel_degree"])
        if n_ranks > 1:
            csv = parallelism["pipeline_parallel_schedule_csv"]
            schedule = Path(csv).name if csv else parallelism["pipeline_parallel_schedule"]
            words.append(f"{schedule} over {n_ranks} ranks")
        if settings.get("emulation", {}).get("enable"):
            words.append("emulated")
        return ", ".join([*words, f"{model['name']} {model['flavor']}"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no run's settings: {error!r}") from error
