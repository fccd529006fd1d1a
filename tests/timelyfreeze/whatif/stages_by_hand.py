"""Twelve layers in four stages, with times that add up in the head."""

from timelyfreeze.whatif.layer_model import layer_model
from timelyfreeze.whatif.times import StageTimes

LAYER = StageTimes(2.0, 4.0, 2.0, 2.0, 2.0, 0.0)
NOTHING = StageTimes()
HAIR = StageTimes(frozen_weight_ms=0.01)
# Embedding: 1 ms forward, 1 ms backward. Head and loss: 6 ms forward, 12 ms backward.
FIRST = StageTimes(7.0, 13.0, 0.0, 0.0, 13.0, 0.0)  # 3 layers; no input gradient, frozen whole
MIDDLE = StageTimes(6.0, 12.0, 6.0, 6.0, 6.0, 0.0)  # 3 layers
LAST = StageTimes(12.0, 24.0, 12.0, 12.0, 12.0, 0.0)  # 3 layers
MODEL = layer_model([FIRST, MIDDLE, MIDDLE, LAST], [3, 3, 3, 3])
# As the measured first stage, but less than what its layers take elsewhere.
LIGHT_FIRST = StageTimes(5.0, 9.0, 0.0, 0.0, 9.0, 0.0)
