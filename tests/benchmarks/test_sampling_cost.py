"""The script that measures sampled weight gradients: what it times, and what it prints."""

import pytest
import sampling_cost
import torch


def test_what_is_saved_and_what_it_costs_make_the_ratio(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By hand: 8 ms exact; 6 ms at a ratio of 0.5, where 4 would be without any cost."""
    asked = []

    def gradients_ms(layers, xs, dys, sample):  # type: ignore[no-untyped-def]
        asked.append((len(layers), len(xs[0]), dys[0].dtype, sample and sample.ratio))
        return 8.0 if sample is None else 6.0

    monkeypatch.setattr(sampling_cost, "gradients_ms", gradients_ms)
    arguments = [
        "--shapes=135M",
        "--tokens=4",
        "--dtype=bfloat16",
        "--ratios",
        "0.5",
        "--repeats=1",
    ]
    sampling_cost.main(arguments)
    assert capsys.readouterr().out.splitlines()[-1] == "| 135M | 8.00 | 0.25 (0.25) |"
    assert asked == 3 * [(7, 4, torch.bfloat16, None), (7, 4, torch.bfloat16, 0.5)]


def test_every_weight_gradient_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    find = sampling_cost.TokenSampler.gradients

    def gradients(self, layer, x, weight, dy, needs):  # type: ignore[no-untyped-def]
        dx, dw = find(self, layer, x, weight, dy, needs)
        assert dx is None
        assert dw.shape == weight.shape
        seen.append(layer)
        return dx, dw

    monkeypatch.setattr(sampling_cost.TokenSampler, "gradients", gradients)
    monkeypatch.setitem(sampling_cost.SHAPES, "tiny", (8, 4, 16))
    times = sampling_cost.measure("tiny", 4, torch.float32, [0.5], repeats=1)
    assert len(times) == 2
    assert seen == 6 * [6, 5, 4, 3, 2, 1, 0]
