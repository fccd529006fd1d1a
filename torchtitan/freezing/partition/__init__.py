"""Where a model is cut into stages so that time, parameters or memory are even."""

from torchtitan.freezing.partition.cut import (
    check_live_times,
    live_layer_times,
    partition_line,
    with_partition,
)
from torchtitan.freezing.partition.sizes import count_model_layers, model_sizes, part_parameters

__all__ = [
    "check_live_times", "count_model_layers", "live_layer_times", "model_sizes", "part_parameters",
    "partition_line", "with_partition",
]  # fmt: skip
