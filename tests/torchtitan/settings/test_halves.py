"""Both halves of a run that begins with adapters are configurations of their own."""

from tests.torchtitan.helpers.job_configs import config, put
from torchtitan.settings import adapters_half, weights_half


def test_adapters_learn_alone_and_phases_begin_behind_them() -> None:
    excluded = ["freezing", "dataloader"]
    whole = config(lora__until=48, checkpoint__exclude_from_loading=excluded)
    put(whole, "freezing", last_warmup_step=60, last_monitor_step=100, last_ramp_step=200)
    first, second = adapters_half(whole), weights_half(whole)
    assert (first.freezing.method, second.freezing.method) == ("lora", "timelyfreeze")
    assert (first.lora.until, second.lora.until, whole.lora.until) == (0, 0, 48)
    assert first.checkpoint.exclude_from_loading == ["dataloader"]
    assert second.checkpoint.exclude_from_loading == excluded
    ends = second.freezing
    assert (ends.last_warmup_step, ends.last_monitor_step, ends.last_ramp_step) == (108, 148, 248)
    assert first.training == second.training == whole.training


def test_steps_of_a_policy_are_counted_from_there_too() -> None:
    whole = config(lora__until=48, freezing__method="egeria")
    whole.freezing.egeria.unfreeze_steps.append(300)
    assert weights_half(whole).freezing.egeria.unfreeze_steps == [348]
    assert whole.freezing.egeria.unfreeze_steps == [300]
