"""What freezing does to tensors and their gradients, measured while a run trains."""

from timelyfreeze.runtime.meters.change_meter import ChangeMeter
from timelyfreeze.runtime.meters.gradient_energy import GradientEnergy
from timelyfreeze.runtime.meters.tally import step_ratios
from timelyfreeze.runtime.meters.update_meter import RankUpdates, UpdateMeter, frozen_counts

__all__ = [
    "ChangeMeter", "GradientEnergy", "RankUpdates", "UpdateMeter", "frozen_counts", "step_ratios",
]  # fmt: skip
