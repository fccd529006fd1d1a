"""Effects of freezing on tensors and their gradients, measured in training."""

from timelyfreeze.runtime.meters.change_meter import ChangeMeter, kept_vectors
from timelyfreeze.runtime.meters.update_meter import (
    GradientEnergy,
    RankUpdates,
    UpdateMeter,
    frozen_counts,
    step_ratios,
)
