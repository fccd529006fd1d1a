"""Whether a run is told that its precision is slower here than float32."""

import pytest
import torch

from torchtitan.upstream import cpu_precision
from torchtitan.upstream.cpu_precision import product_s, slow_precision

CPU = torch.device("cpu")


@pytest.mark.parametrize(("seconds", "is_told"), [(5.0, True), (0.5, False)])
def test_a_precision_without_units_is_told(
    seconds: float, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = {torch.bfloat16: seconds, torch.float32: 1.0}
    monkeypatch.setattr(cpu_precision, "product_s", taken.__getitem__)
    told = slow_precision(torch.bfloat16, CPU)
    assert (told is not None) is is_told
    assert not is_told or "a product in bfloat16 takes 5 times as long as in float32" in told
    assert slow_precision(torch.float32, CPU) is None
    assert slow_precision(torch.bfloat16, torch.device("cuda")) is None


def test_a_product_takes_some_time() -> None:
    assert 0.0 < product_s(torch.float32) < 1.0
