"""How long a precision takes on this CPU: one that it has no units for, many times as long."""

from __future__ import annotations

import time

import torch

_SIDE = 128  # of the matrices: a product takes less than a millisecond with units, and some without
_SLOW = 2.0


def slow_precision(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return what to say of ``training.mixed_precision_param`` if float32 is faster here."""
    if device.type != "cpu" or dtype == torch.float32:
        return None
    factor = product_s(dtype) / product_s(torch.float32)
    if factor < _SLOW:
        return None
    return (
        f"On this CPU a product in {str(dtype).removeprefix('torch.')} takes {factor:.0f} times as "
        'long as in float32; training.mixed_precision_param = "float32" is faster'
    )


def product_s(dtype: torch.dtype) -> float:
    """Return seconds of processor time that a product of matrices takes, the best of some."""
    one = torch.ones(_SIDE, _SIDE, dtype=dtype)
    times = []
    for _ in range(4):  # the first one prepares
        started = time.process_time()
        one @ one
        times.append(time.process_time() - started)
    return min(times)
