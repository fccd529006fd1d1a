"""Settings in which the runs of a comparison differ: parsed, told apart, named.

Among the runs are peers: a user's choice without freezing, in the time of a freezing run. A peer
trains with method none, and with less work than the run of none:

- ``fewer_steps``: fewer steps, the learning-rate schedule squeezed with them;
- ``fewer_microbatches``: as many steps, over fewer microbatches.

A peer belongs to a freezing method and its time: ``fewer_steps_for_apf``. Its work follows from the
time and the run of none (``asked``).
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from timelyfreeze.policies import LORA, registered_policies

FEWER_STEPS, FEWER_MICROBATCHES = "fewer_steps", "fewer_microbatches"
PEERS = (FEWER_STEPS, FEWER_MICROBATCHES)
# What a peer changes of the run of none. Values differ from seed to seed, as times do.
PEER_KEYS = frozenset({
    "training.steps", "training.local_batch_size", "training.global_batch_size",
    "lr_scheduler.warmup_steps", "lr_scheduler.total_steps", "validation.freq",
})  # fmt: skip
_FOR = "_for_"


def peer_name(peer: str, method: str) -> str:
    """Return the method name of a freezing method's ``peer``."""
    return f"{peer}{_FOR}{method}"


def split_peer(name: str) -> tuple[str, str] | None:
    """Return peer and freezing method of a ``peer_name``; None for other names."""
    peer, _, method = name.partition(_FOR)
    return (peer, method) if peer in PEERS and method else None


def freezes(method: str) -> bool:
    """Return whether a run by its name freezes anything."""
    return method != "none" and split_peer(method) is None


# Flat: a key is the name of section and option, as on the command line.
FlatSettings = Mapping[str, Any]


# How long a step takes depends on these, apart from the freezing.
WORK = ("model", "training", "parallelism", "activation_checkpoint", "compile", "quantize",
        "emulation")  # fmt: skip
UNTIL = "lora.until"
SECTIONS = (*WORK, "optimizer", "lr_scheduler", "data", "freezing", LORA)
# What a comparison varies by itself, where files lie, and what changes no metric.
LEFT_OUT = frozenset({
    "freezing.method", "freezing.seed", "data.seed", "training.seed",
    "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_schedule_csv",
    "training.dataset_path", "training.gc_freq", "training.gc_debug", "model.hf_assets_path",
    "model.tokenizer_path", "model.print_after_conversion",
    "parallelism.pipeline_parallel_expert_parallel_overlap",
})  # fmt: skip
# Upstream's list of every stage's modules, and ours, from which it follows.
_CUT = "parallelism.module_fqns_per_model_part"
_PARTITION = "parallelism.partition"
# Options of `compare run` that set these.
_OPTIONS = {
    "freezing.method": "--methods",
    "parallelism.pipeline_parallel_schedule": "--schedules",
    **dict.fromkeys(("debug.seed", "data.seed", "freezing.seed"), "--seeds"),
    "job.config_file": "CONFIG",
    "job.dump_folder": "OUTPUT",
}
# As they stand in a variant; on the command line they are --key and --no_key.
TRUTHS = {"true": True, "false": False}
# Readers know options of these sections without their section.
_SHORT = re.compile(r"^(freezing|parallelism|training)\.")
_ASKED = re.compile(r"([a-z_]\w*(?:\.\w+)+)=([^,]+(?:,[^,]+)*)")


def parse_variants(texts: Sequence[str]) -> list[dict[str, str]]:
    """Return the variants of ``--vary``: the product of all values of all keys."""
    values: dict[str, list[str]] = {}
    for text in texts:
        match = _ASKED.fullmatch(text)
        if match is None:
            raise ValueError(
                f"--vary is {text!r}; it must be a key and its values, such as "
                "freezing.max_freeze_ratio=0.2,0.4"
            )
        key, listed = match.groups()
        if key in _OPTIONS:
            raise ValueError(f"--vary has {key}; use {_OPTIONS[key]} instead")
        if key in values:
            raise ValueError(f"--vary has {key} twice; give all its values at once")
        values[key] = listed.split(",")
        if len({read_value(text) for text in values[key]}) < len(values[key]):
            raise ValueError(f"--vary has {key}={listed}; name each value once")
    return [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]


def concerning(name: str, variant: Mapping[str, str]) -> dict[str, str]:
    """Return the keys of a variant with an effect on a method or its peer."""
    _, method = split_peer(name) or ("", name)
    if variant.get(UNTIL, "0") != "0" and _concerns(UNTIL, method):
        method = f"{LORA}+{method}"
    return {key: value for key, value in variant.items() if _concerns(key, method)}


def run_label(schedule: str, name: str, seed: int | None, variant: Mapping[str, Any]) -> str:
    """Return a run's name for readers."""
    varied = [f"{_short(key)} {value}" for key, value in variant.items()]
    return " ".join([schedule, name, *varied, f"seed {'-' if seed is None else seed}"])


def run_folder(schedule: str, name: str, seed: int, variant: Mapping[str, str]) -> Path:
    """Return the folder of a run, another for each variant."""
    varied = (quote(f"{_short(key)}={value}", safe="=") for key, value in variant.items())
    return Path(schedule, name, *varied, f"seed_{seed}")


def read_value(text: str) -> Any:
    """Return a varied value in the type of a run's settings: number, truth or text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return TRUTHS.get(text, text)


def work_differs(one: FlatSettings, other: FlatSettings) -> bool:
    """Tell whether steps, however many, of two runs do or count other things, where known."""
    return any(
        key in other and other[key] != value
        for key, value in one.items()
        if (key.split(".")[0] in WORK and key not in LEFT_OUT and key != "training.steps")
        or key == "report.count_padding"
    )


def variants(method: str, runs: Sequence[tuple[FlatSettings, FlatSettings]]) -> list[str]:
    """Return by run the settings unlike those of its method's other runs.

    Seeds, schedules and the options of other methods count for nothing, for ``none`` and its peers
    no option of the freezing, and for peers nothing that is fitted. Variants (a run's second
    settings) count in any case, also where missing.
    """
    counting = [
        {key: value for key, value in own.items() if _counts(key, method, own)} | dict(variant)
        for own, variant in runs
    ]
    keys = set(itertools.chain.from_iterable(counting))
    always = {key for _, variant in runs for key in variant}

    def differs(key: str) -> bool:
        known = {repr(own[key]) for own in counting if key in own}
        return len(known) + (key in always and any(key not in own for own in counting)) > 1

    apart = {key for key in keys if differs(key)}
    told = ([(_short(key), own[key]) for key in own if key in apart] for own in counting)
    return [
        ", ".join(f"{name} {'unset' if value in ('', None) else value}" for name, value in one)
        for one in told
    ]


def _short(key: str) -> str:
    return _SHORT.sub("", key)


def _counts(key: str, method: str, own: FlatSettings) -> bool:
    """Return whether ``key`` may set runs of ``method`` apart and repeats no other key."""
    if (key == _CUT and own.get(_PARTITION)) or (split_peer(method) and key in PEER_KEYS):
        return False
    return key.split(".")[0] in SECTIONS and key not in LEFT_OUT and _concerns(key, method)


def _concerns(key: str, method: str) -> bool:
    """Return whether ``key`` affects a run of ``method``, as far as known."""
    section = key.split(".")[0]
    if key == UNTIL:
        return method != LORA and freezes(method)
    if section == LORA:
        return LORA in method.split("+")
    if section != "freezing":
        return True
    others = registered_policies().keys() - method.split("+")
    is_of_other = any(section in others for section in key.split(".")[1:-1])
    return method != LORA and freezes(method) and not is_of_other
