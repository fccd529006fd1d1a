"""TorchTitan's device module, for a CPU."""

import os
import platform
import time
import timeit
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_CPUINFO = Path("/proc/cpuinfo")


class CpuDevice:
    """The CPU in the shape of ``torch.cuda``: one device, index 0, always in step with the host."""

    is_available = staticmethod(torch.cpu.is_available)
    device_count = staticmethod(torch.cpu.device_count)
    set_device = staticmethod(torch.cpu.set_device)
    synchronize = empty_cache = staticmethod(torch.cpu.synchronize)

    @staticmethod
    def current_device() -> int:
        """Return 0."""
        return 0

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        """Return the processor's model name."""
        return _entry(_CPUINFO, "model name") or platform.processor() or platform.machine()

    @staticmethod
    def get_device_properties(device: Any = None) -> SimpleNamespace:
        """Return an object with ``total_memory`` in bytes."""
        return SimpleNamespace(
            total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        )

    @staticmethod
    def memory_stats(device: Any = None) -> dict[str, int]:
        """Return the peak resident set in bytes, under the CUDA allocator's names."""
        resident_kb = _entry(_STATUS, "VmHWM")  # such as "1234 kB"
        peak = int(resident_kb.split()[0]) * 1024 if resident_kb else -1
        return {
            "active_bytes.all.peak": peak,
            "reserved_bytes.all.peak": peak,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    @staticmethod
    def reset_peak_memory_stats(device: Any = None) -> None:
        """Start a new peak, if the kernel allows."""
        try:
            _CLEAR_REFS.write_text("5")  # proc(5): resets the peak resident set size
        except OSError:
            return  # the peak then stays that of the whole run


def _entry(file: Path, key: str) -> str | None:
    """Return the text behind ``key`` and a colon on the first such line of ``file``."""
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)


_SIDE = 128  # of the matrices: a product takes less than a millisecond with units, and some without
_SLOW = 2.0


def slow_precision(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return a warning on ``training.mixed_precision_param`` if float32 is faster here."""
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
    """Return the best processor time of some products of matrices, seconds."""
    one = torch.ones(_SIDE, _SIDE, dtype=dtype)
    # The first one prepares.
    return min(timeit.repeat(lambda: one @ one, timer=time.process_time, number=1, repeat=4))
