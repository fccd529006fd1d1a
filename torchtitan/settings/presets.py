"""Configurations made from a run's: by ``freezing.preset``, a word for a group of keys, and halves.

A run with ``lora.until`` has two halves: adapters learn first, then all weights. Each is the
configuration of a run of its own, without ``lora.until``.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from timelyfreeze.policies import LORA
from timelyfreeze.settings import AUTO, OFF, PER_TENSOR
from torchtitan.settings.job_config import JobConfig

_FREEZING = "freezing"  # in a checkpoint
_ENDS_OF_PHASES = ("last_warmup_step", "last_monitor_step", "last_ramp_step")


@dataclass(frozen=True)
class Preset:
    """Keys of a preset: fixed, with other values refused, and merely set."""

    fixed: Mapping[str, Any]
    usual: Mapping[str, Any]


# arXiv:2602.05754 where our defaults differ; docs/method.md, "Paper and code".
PRESETS = {
    "paper": Preset(
        fixed={
            "freezing.gradient_rank": 0,
            "freezing.first_stage": PER_TENSOR,
            "freezing.skip_input_grads": OFF,
            "freezing.monitoring": "halves",
            "freezing.replan_every": 0,
            "freezing.control_every": 0,
            "freezing.min_gain": -1.0,
            "freezing.apf.reduction": "share",
            "freezing.autofreeze.delta": "updates",
            "freezing.autofreeze.change": "signed",
            "report.count_padding": True,
        },
        usual={"freezing.max_freeze_ratio": 0.8, "freezing.autofreeze.percentile": 80.0},
    )
}


def preset_errors(job_config: JobConfig, given: Collection[str]) -> Iterator[str]:
    """Yield errors of the preset, if ``given`` keys stand in the file or command line."""
    name = job_config.freezing.preset
    if not name:
        return
    if name not in PRESETS:
        yield f"freezing.preset is {name!r}; known: {', '.join(PRESETS)}"
        return
    for key, value in PRESETS[name].fixed.items():
        if key in given and (own := attrgetter(key)(job_config)) != value:
            yield (
                f"{key} is {own!r}, and freezing.preset {name!r} stands for {value!r}; remove one "
                "of the two"
            )
    cap = "freezing.max_freeze_ratio"
    if cap in given and attrgetter(cap)(job_config) == AUTO:
        yield f'{cap} is "{AUTO}", which the preset {name!r} does not know; set a number'


def with_preset(job_config: JobConfig, given: Collection[str]) -> JobConfig:
    """Return a configuration with the keys of its preset, if any."""
    preset = PRESETS.get(job_config.freezing.preset)
    if preset is None:
        return job_config
    usual = {key: value for key, value in preset.usual.items() if key not in given}
    return with_values(job_config, {**preset.fixed, **usual})


def preset_line(job_config: JobConfig) -> str | None:
    """Return the keys set by a preset, as a line of the log; None without a preset."""
    preset = PRESETS.get(job_config.freezing.preset)
    if preset is None:
        return None
    keys = [*preset.fixed, *preset.usual]
    if "apf" in job_config.freezing.method.split("+"):
        keys.append("freezing.apf.threshold")  # which is one of another reduction's scores
    values = {key: attrgetter(key)(job_config) for key in keys}
    told = ", ".join(f"{key} = {value!r}" for key, value in values.items())
    return f"freezing.preset = {job_config.freezing.preset!r}: {told}"


def with_values(section: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of a section whose keys have other values; policies' cannot be changed."""
    for key, value in values.items():
        name, _, rest = key.partition(".")
        held = with_values(getattr(section, name), {rest: value}) if rest else value
        section = replace(section, **{name: held})
    return section


def adapters_half(config: JobConfig) -> JobConfig:
    """Return the configuration of the first half."""
    excluded = [name for name in config.checkpoint.exclude_from_loading if name != _FREEZING]
    return with_values(
        config,
        {
            "freezing.method": LORA,
            "lora.until": 0,
            "checkpoint.exclude_from_loading": excluded,  # which has no state of freezing
        },
    )


def weights_half(config: JobConfig) -> JobConfig:
    """Return the configuration of the second half, its phases counted from the first step."""
    freezing, until = config.freezing, config.lora.until
    values = {f"freezing.{name}": getattr(freezing, name) + until for name in _ENDS_OF_PHASES}
    if egeria := getattr(freezing, "egeria", None):
        steps = [step + until for step in egeria.unfreeze_steps]
        values["freezing.egeria.unfreeze_steps"] = steps
    return with_values(config, {**values, "lora.until": 0})
