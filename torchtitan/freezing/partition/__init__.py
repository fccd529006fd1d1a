"""Where a model is cut into stages so that time, parameters or memory are even."""

from torchtitan.freezing.partition.cut import partition_line, with_partition
from torchtitan.freezing.partition.sizes import model_sizes

__all__ = ["model_sizes", "partition_line", "with_partition"]
