"""torch's kernel for documents on a GPU, against the mask. Run with ``scripts/gpu_checks.sh``."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torchtitan.models.llama3 import TransformerModelArgs

from torchtitan.data.sequences import EncodedExample, as_batch, join_examples
from torchtitan.hf import decoder
from torchtitan.hf.decoder import Decoder, as_decoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCABULARY = 64


def make(seq_len: int) -> nn.Module:
    args = TransformerModelArgs(
        dim=256, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=VOCABULARY, max_seq_len=seq_len
    )
    torch.manual_seed(0)
    model = Decoder(as_decoder(args)).cuda()
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cuda"))
        for weight in model.layers.parameters():
            if weight.dim() > 1:
                weight *= 4.0
    return model


def batch_of(groups: list[list[int]], seq_len: int) -> dict[str, Tensor]:
    """Sequences of random documents as long as they are told, on the device."""
    rows = []
    for group in groups:
        ids = [torch.randint(VOCABULARY, (n,)) for n in group]
        labels = [torch.full((n,), -100) for n in group]
        examples = [EncodedExample(i, t, len(i), 0) for i, t in zip(ids, labels, strict=True)]
        rows.append(join_examples(examples, seq_len, 0))
    inputs, _ = as_batch(rows)
    return {name: value.cuda() for name, value in inputs.items()}


def run(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    given = {name: batch[name] for name in ("positions", "lengths")}
    logits = model(batch["input"], **given)
    logits.float().square().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return grads | {"logits": logits.detach().float()}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[n] - expected[n]).norm() / expected[n].norm()) for n in expected)


@contextmanager
def masks_alone() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "has_document_kernel", lambda device, head_dim: False)
        yield


BATCH = ([[100, 7, 300], [512], [1] * 40 + [200]], 512)


def test_the_kernel_is_as_near_to_float32_as_the_mask():
    batch, model = batch_of(*BATCH), make(512)
    with masks_alone():
        expected = run(model, batch)
        with torch.autocast("cuda", torch.bfloat16):
            by_mask = run(model, batch)
    calls = []
    with pytest.MonkeyPatch.context() as patch, torch.autocast("cuda", torch.bfloat16):
        kernel = decoder.varlen_attn
        patch.setattr(decoder, "varlen_attn", lambda *a, **k: calls.append(a) or kernel(*a, **k))
        by_document = run(model, batch)
    assert len(calls) == 2
    assert difference(by_mask, expected) < 0.05
    assert difference(by_document, expected) < 1.3 * difference(by_mask, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_neither_way_waits_for_the_device(dtype):
    batch, model = batch_of(*BATCH), make(512)
    with torch.autocast("cuda", dtype, enabled=dtype is torch.bfloat16):
        run(model, batch)  # libraries are loaded
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(model, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def peak_bytes(seq_len: int) -> int:
    batch, model = batch_of([[200] * (seq_len // 200)], seq_len), make(seq_len)
    with torch.autocast("cuda", torch.bfloat16):
        run(model, batch)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(model, batch)
    return torch.cuda.max_memory_allocated() - before


def test_memory_grows_with_the_sequence():
    assert peak_bytes(16384) < 2.2 * peak_bytes(8192)
    with masks_alone():
        assert peak_bytes(16384) > 2.6 * peak_bytes(8192)
