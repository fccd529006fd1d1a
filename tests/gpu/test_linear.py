"""Products of 16-bit stages on a GPU: sums in float32, against double precision and a CPU."""

import copy

import pytest
import torch

from tests.torchtitan.hf.test_lean import batch, gradients, lean, model
from timelyfreeze.runtime.linear import keep_copies
from timelyfreeze.runtime.linear.products import added

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_is_added_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    dy, x = (torch.randn(512, n, device="cuda").to(dtype) for n in (96, 64))
    left, right = dy[:, 16:80].t(), x
    exact = left.double() @ right.double()
    first = added(None, left, right, torch.float32)
    assert first.dtype == torch.float32
    torch.testing.assert_close(first.double(), exact, rtol=1e-5, atol=1e-4)
    place = first.data_ptr()
    both = added(first, left, right, torch.float32)
    assert both.data_ptr() == place
    torch.testing.assert_close(both.double(), 2 * exact, rtol=1e-5, atol=1e-4)


def test_a_stage_has_the_gradients_of_a_cpu_and_waits_for_nothing() -> None:
    _, wanted = gradients(lean(model()))
    part = lean(copy.deepcopy(model()).cuda())
    torch.manual_seed(1)
    tokens, labels, positions = (each.cuda() for each in batch())
    torch.cuda.synchronize()
    for _ in range(2):  # the first makes what stays
        part.zero_grad()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with keep_copies([part]):
                logits = part(tokens, positions=positions)
                loss = torch.nn.functional.cross_entropy(
                    logits.float().flatten(0, 1), labels.flatten()
                )
                loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for name, parameter in part.named_parameters():
        scale = wanted[name].abs().max().item()
        torch.testing.assert_close(parameter.grad.cpu(), wanted[name], rtol=0.0, atol=0.05 * scale)
