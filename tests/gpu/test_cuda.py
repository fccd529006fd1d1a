"""What only a GPU can show. Run with ``scripts/gpu_checks.sh``; skipped where there is none."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from timelyfreeze.policies.policy import Measurement, Metric, Source
from timelyfreeze.runtime.linear import StageLinears
from timelyfreeze.runtime.low_rank import Subspaces, first_basis
from timelyfreeze.runtime.masked_backward import masked_full_backward
from timelyfreeze.runtime.meters.change_meter import ChangeMeter
from timelyfreeze.runtime.recorder import ActionRecorder, CudaClock
from timelyfreeze.schedule.order import parse_action
from torchtitan.upstream import fixes as upstream_fixes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_events_measure_device_work_and_never_wait_inside_a_pass():
    recorder = ActionRecorder(CudaClock())
    matrix = torch.randn(4096, 4096, device="cuda")
    with recorder.recorded_batch():
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("source", [Source.UPDATES, Source.GRADIENTS])
def test_vectors_on_the_host_give_the_metrics_of_those_on_the_device(source, dtype):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(300, 50, device="cuda")) for _ in range(3)]
    named = [(f"layers.{i}.weight", p) for i, p in enumerate(parameters)]
    measurement = Measurement(source, (Metric.SQUARE_SUM, Metric.MEAN_ABS_SUM), decay=0.9)
    device, host = (ChangeMeter(named, measurement, on_host=h, dtype=dtype) for h in (False, True))
    for meter in (device, host):
        meter.begin()
    before = torch.cuda.memory_allocated()
    ChangeMeter(named, measurement, on_host=True, dtype=dtype).begin()
    assert torch.cuda.memory_allocated() == before
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
            with torch.no_grad():
                parameter -= 0.01 * parameter.grad
        for meter in (device, host):
            meter.add_step(np.ones(len(parameters)))
        on_device, on_host = device.take(), host.take()
        for metric, numbers in on_device.items():
            assert on_host[metric] == pytest.approx(numbers, rel=1e-5)


def test_subspaces_turn_without_a_wait_and_give_the_projected_gradient():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(96, 64, bias=False), nn.Linear(64, 128, bias=False)).cuda()
    weights = dict(block.named_parameters())
    low_rank = StageLinears(block)
    low_rank.learn_frozen(16, partial(first_basis, seed=0))
    x = torch.randn(256, 96, device="cuda", requires_grad=True)
    block(x).square().sum().backward()
    expected = {name: weight.grad.clone() for name, weight in weights.items()}
    subspaces = Subspaces([low_rank], 0, [16])
    subspaces.begin_step(1, 1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        subspaces.end_batch(0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for weight in weights.values():
        weight.grad = None
    with low_rank.action_of(0, weights.keys()):
        block(x).square().sum().backward()
    low_rank.add_to_gradients()
    for name, weight in weights.items():
        q, whole = low_rank.bases[name], expected[name]
        projected = whole @ q @ q.T if name == "1.weight" else q @ (q.T @ whole)
        torch.testing.assert_close(weight.grad, projected, rtol=1e-4, atol=1e-4 * whole.abs().max())
