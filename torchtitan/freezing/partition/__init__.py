"""Where a model is cut into stages so that time, parameters or memory are even."""

from torchtitan.freezing.partition.cut import (
    check_live_times,
    count_model_layers,
    live_layer_times,
    model_sizes,
    part_parameters,
    partition_line,
    with_partition,
)

__all__ = [
    "check_live_times", "count_model_layers", "live_layer_times", "model_sizes", "part_parameters",
    "partition_line", "with_partition",
]  # fmt: skip
