"""The halves of a run with ``lora.until``: adapters learn first, then all weights.

Each is the configuration of a run of its own, without ``lora.until``.
"""

from timelyfreeze.policies import LORA
from torchtitan.settings.job_config import JobConfig
from torchtitan.settings.presets import with_values

_FREEZING = "freezing"  # in a checkpoint
_ENDS_OF_PHASES = ("last_warmup_step", "last_monitor_step", "last_ramp_step")


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
