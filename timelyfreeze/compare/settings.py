"""In which settings runs differ: what makes them repeats of each other, or not comparable.

Settings are flat here: a key is the name of section and option, as on the command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

# How long a step takes depends on these, apart from the freezing.
WORK = ("model", "training", "parallelism", "activation_checkpoint", "compile", "quantize",
        "emulation")  # fmt: skip
SECTIONS = (*WORK, "optimizer", "lr_scheduler", "data", "freezing")
# What a comparison varies by itself, where files lie, and what changes no metric.
LEFT_OUT = frozenset(
    {
        "freezing.method", "freezing.seed", "data.seed", "training.seed",
        "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_schedule_csv",
        "training.dataset_path", "training.gc_freq", "training.gc_debug", "model.hf_assets_path",
        "model.tokenizer_path", "model.print_after_conversion",
        "parallelism.pipeline_parallel_expert_parallel_overlap",
    }
)  # fmt: skip

Settings = Mapping[str, Any]


def work_differs(one: Settings, other: Settings) -> bool:
    """Tell whether steps of two runs have something else to do, as far as both are known.

    How many steps there are is no part of it.
    """
    return any(
        key in other and other[key] != value
        for key, value in one.items()
        if key.split(".")[0] in WORK and key not in LEFT_OUT and key != "training.steps"
    )


def variants(method: str, settings: Sequence[Settings]) -> list[str]:
    """Return of each run the settings in which it differs from other runs of its method.

    Seeds, schedules and the options of other methods count for nothing, and for ``none`` no option
    of the freezing.

    Args:
        method: Of all the runs.
        settings: Of each run, flat; empty if they are not known.

    Returns:
        Text such as ``max_freeze_ratio 0.5``, empty where runs do not differ.
    """
    counting = [{key: own[key] for key in own if _counts(key, method)} for own in settings]
    written = pd.DataFrame([{key: repr(own[key]) for key in own} for own in counting])
    apart = {key for key in written if written[key].nunique() > 1}
    return [
        ", ".join(f"{_name(key)} {value}" for key, value in own.items() if key in apart)
        for own in counting
    ]


def _counts(key: str, method: str) -> bool:
    """Return whether ``key`` may set runs of ``method`` apart."""
    section, *rest = key.split(".")
    if section not in SECTIONS or key in LEFT_OUT:
        return False
    if section != "freezing":
        return True
    return method != "none" and (len(rest) < 2 or rest[0] in method.split("+"))


def _name(key: str) -> str:
    """Return a key as it is known to readers: that of the freezing without its section."""
    return key.removeprefix("freezing.").removeprefix("parallelism.").removeprefix("training.")
