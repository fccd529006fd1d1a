"""Finds what keeps linear layers from running in float8, before a process group starts.

Upstream tells most of it, but once all processes have met, and of a missing package last.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from torchtitan.tools.utils import has_cuda_capability

from torchtitan.freezing.checks.compile import compiles_blocks
from torchtitan.freezing.config import JobConfig

LINEAR = "quantize.linear.float8"
GROUPED = "quantize.grouped_mm.float8"


def float8_errors(config: JobConfig) -> Iterator[str]:
    """Yield what is wrong with the float8 converters of ``model.converters``."""
    converters = config.model.converters
    asked = [name for name in (LINEAR, GROUPED) if name in converters]
    if asked and importlib.util.find_spec("torchao") is None:
        yield f"model.converters has {asked[0]!r}, which needs the package torchao; install it"
    if LINEAR in converters and not has_cuda_capability(8, 9):
        if not config.quantize.linear.float8.emulate:
            yield (
                f"model.converters has {LINEAR!r}, which needs a GPU of compute capability 8.9 or "
                f"more; elsewhere set {LINEAR}.emulate = true, to try it slowly"
            )
        elif compiles_blocks(config):
            yield (
                f'{LINEAR}.emulate is true and compile.components has "model"; without a GPU of '
                "compute capability 8.9 float8 is emulated in eager blocks only, so set "
                'compile.enable = false or components = ["loss"]'
            )
    degree = config.parallelism.pipeline_parallel_degree
    if GROUPED in converters and degree > 1:
        yield (
            f"model.converters has {GROUPED!r} and parallelism.pipeline_parallel_degree is "
            f"{degree}; upstream has it for a single stage only, so remove it"
        )
