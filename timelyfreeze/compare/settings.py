"""In which settings runs differ: what makes them repeats of each other, or not comparable.

A run leaves all of its configuration in ``settings.json``. Here it is flat: a key is the name of
section and option, as on the command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SETTINGS = "settings.json"

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


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested ``settings`` as one level of dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


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
    values: dict[str, set[str]] = {}
    for own in settings:
        for key in _counting(method, own):
            values.setdefault(key, set()).add(repr(own[key]))
    return [
        ", ".join(
            f"{_name(key)} {own[key]}" for key in _counting(method, own) if len(values[key]) > 1
        )
        for own in settings
    ]


def _counting(method: str, settings: Settings) -> Iterator[str]:
    """Yield the keys that may set runs of ``method`` apart."""
    for key in settings:
        section, *rest = key.split(".")
        if section not in SECTIONS or key in LEFT_OUT:
            continue
        if section == "freezing" and method == "none":
            continue
        if section == "freezing" and len(rest) > 1 and rest[0] not in method.split("+"):
            continue
        yield key


def _name(key: str) -> str:
    """Return a key as it is known to readers: that of the freezing without its section."""
    return key.removeprefix("freezing.").removeprefix("parallelism.").removeprefix("training.")
