import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchtitan.upstream import cpu_device
from torchtitan.upstream.cpu_device import CpuDevice, product_s, slow_precision

LARGE = 256 * 1024 * 1024

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs Linux's /proc"
)


def test_there_is_one_device_and_it_is_number_0() -> None:
    assert CpuDevice.is_available()
    assert CpuDevice.device_count() == 1
    CpuDevice.set_device(0)
    assert CpuDevice.current_device() == 0
    assert torch.device("cpu", CpuDevice.current_device()).type == "cpu"
    CpuDevice.synchronize()
    CpuDevice.empty_cache()


def test_the_name_is_the_processors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert CpuDevice.get_device_name(0)
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Fast: 9000 @ 3GHz\nmodel name\t: Other\n")
    monkeypatch.setattr(cpu_device, "_CPUINFO", info)
    assert CpuDevice.get_device_name() == "Fast: 9000 @ 3GHz"
    info.write_text("processor\t: 0\n")  # as on many ARM machines
    assert CpuDevice.get_device_name() in {platform.processor(), platform.machine()}


def peaks_in_a_fresh_process(code: str) -> list[dict[str, int]]:
    """Run ``code``, which appends to ``seen``, where no other test has held memory before."""
    script = f"""
import importlib.util, json
spec = importlib.util.spec_from_file_location("cpu_device", {cpu_device.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
CpuDevice, LARGE, seen = module.CpuDevice, {LARGE}, []
{code}
print(json.dumps(seen))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    seen: list[dict[str, int]] = json.loads(done.stdout)
    return seen


@needs_proc
def test_the_peak_grows_with_what_the_process_holds() -> None:
    before, after = peaks_in_a_fresh_process(
        "seen.append(CpuDevice.memory_stats())\n"
        "held = bytearray(b'1') * LARGE\n"
        "del held\n"  # a peak outlives what made it
        "seen.append(CpuDevice.memory_stats(0))"
    )
    for key in ("active_bytes.all.peak", "reserved_bytes.all.peak"):
        assert after[key] - before[key] > 0.9 * LARGE
        assert after[key] < CpuDevice.get_device_properties().total_memory
    assert (after["num_alloc_retries"], after["num_ooms"]) == (0, 0)


@needs_proc
def test_a_peak_can_be_forgotten_where_the_kernel_allows_it() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this kernel lets no process reset its peak")
    high, low = peaks_in_a_fresh_process(
        "held = bytearray(b'1') * LARGE\n"
        "seen.append(CpuDevice.memory_stats())\n"
        "del held\n"
        "CpuDevice.reset_peak_memory_stats()\n"
        "seen.append(CpuDevice.memory_stats())"
    )
    assert high["active_bytes.all.peak"] - low["active_bytes.all.peak"] > 0.9 * LARGE


def test_a_kernel_that_refuses_a_reset_does_no_harm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu_device, "_CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    CpuDevice.reset_peak_memory_stats()
    monkeypatch.setattr(cpu_device, "_STATUS", tmp_path / "status")
    assert CpuDevice.memory_stats()["active_bytes.all.peak"] == -1


CPU = torch.device("cpu")


@pytest.mark.parametrize(("seconds", "is_told"), [(5.0, True), (0.5, False)])
def test_a_precision_without_units_is_told(
    seconds: float, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = {torch.bfloat16: seconds, torch.float32: 1.0}
    monkeypatch.setattr(cpu_device, "product_s", taken.__getitem__)
    told = slow_precision(torch.bfloat16, CPU)
    assert (told is not None) is is_told
    assert not is_told or "a product in bfloat16 takes 5 times as long as in float32" in told
    assert slow_precision(torch.float32, CPU) is None
    assert slow_precision(torch.bfloat16, torch.device("cuda")) is None


def test_a_product_takes_some_time() -> None:
    assert 0.0 < product_s(torch.float32) < 1.0
