"""Eager stages that freeze as compiled ones do: each transformer block all or nothing."""

from timelyfreeze.runtime.stage import FreezingStage

_attach = FreezingStage.attach


def attach(stage, *args, **kwargs):
    _attach(stage, *args, **kwargs)
    if stage.frozen_together:
        return  # compiled, so it knows
    blocks = {}
    for i, name in enumerate(stage.parameter_names):
        if name.startswith("layers.") and not stage.exact[i]:
            blocks.setdefault(name.split(".")[1], []).append(i)
    stage.frozen_together = tuple(map(tuple, blocks.values()))


FreezingStage.attach = attach
