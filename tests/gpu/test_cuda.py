"""What only a GPU can show. Run with ``scripts/gpu_checks.sh``; skipped where there is none."""

import pytest
import torch
from torch import nn

from timelyfreeze.actions import parse_action
from timelyfreeze.masked_backward import masked_full_backward
from timelyfreeze.recorder import ActionRecorder, CudaClock
from torchtitan import upstream_fixes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_events_measure_device_work_and_never_wait_inside_a_pass():
    recorder = ActionRecorder(CudaClock())
    matrix = torch.randn(4096, 4096, device="cuda")
    with recorder.recorded_pass():
        for _ in range(3):
            with recorder.measure(parse_action("0F0")):
                for _ in range(20):
                    matrix = torch.nn.functional.normalize(matrix @ matrix)
            # The host has run ahead: the device is still busy with what was just measured.
            assert not torch.cuda.current_stream().query()
    (record,) = recorder.drain()
    assert 0 < record.durations_ms[parse_action("0F0")] <= record.span_ms


def test_masked_backward_equals_unmasked_times_mask():
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).cuda()
    x = torch.randn(64, 256, device="cuda", requires_grad=True)
    layers(x).square().mean().backward()
    expected = [p.grad.clone() for p in layers.parameters()]
    expected_input = x.grad.clone()
    layers.zero_grad()
    x.grad = None
    live = list(layers.parameters())[::3]
    (grad_input,) = masked_full_backward(layers(x).square().mean(), None, [x], live)
    assert torch.equal(grad_input, expected_input)
    for parameter, grad in zip(layers.parameters(), expected, strict=True):
        if any(parameter is p for p in live):
            assert torch.equal(parameter.grad, grad)
        else:
            assert parameter.grad is None


def test_gradient_norm_of_a_rank_without_gradients_stays_on_the_device():
    upstream_fixes.install()
    import torchtitan.distributed.utils as titan_dist

    frozen = [nn.Parameter(torch.ones(3, device="cuda"))]
    assert titan_dist.clip_grad_norm_(frozen, 1.0).device.type == "cuda"
