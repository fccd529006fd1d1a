"""Packed sequences without a mask: the kernel for documents is given what the mask says."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from tests.torchtitan.helpers.document_kernel import CALLS, kernel_on_the_cpu
from tests.torchtitan.hf.test_decoder import (
    ARGS,
    PACKED,
    SEQ_LEN,
    example_of,
    gradients,
    make,
    relative_difference,
    sum_loss,
)
from torchtitan.data.sequences import as_batch, join_examples, pack
from torchtitan.hf import decoder
from torchtitan.hf.decoder import Decoder, document_bounds, document_mask, has_document_kernel


def run(model: nn.Module, dtype: torch.dtype | None = None) -> tuple[float, dict[str, Tensor]]:
    """The loss and gradients of the packed batch; under autocast if there is a type."""
    inputs, labels = as_batch([(dict(one), labels) for one, labels in PACKED])
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        out = model(inputs["input"], positions=inputs["positions"], lengths=inputs["lengths"])
        loss = sum_loss(out, labels)
    loss.backward()
    return loss.item(), gradients(model)


@given(lengths=st.lists(st.integers(1, SEQ_LEN), min_size=1, max_size=30))
def test_bounds_are_where_positions_begin_again(lengths: list[int]) -> None:
    sequences = pack(lengths, SEQ_LEN)
    examples = [example_of(n, seed) for seed, n in enumerate(lengths)]
    inputs, _ = as_batch([join_examples([examples[i] for i in s], SEQ_LEN, 3) for s in sequences])
    bounds = document_bounds(inputs["lengths"])
    assert bounds.shape == (inputs["lengths"].numel() + 1,)
    begins = (inputs["positions"].flatten() == 0).nonzero().flatten().tolist()
    assert bounds.unique().tolist() == [*begins, SEQ_LEN * len(sequences)]
    assert bounds.tolist() == sorted(bounds.tolist())


def test_bounds_by_hand_and_without_looking_at_a_device() -> None:
    lengths = torch.tensor([[3, 2, 3, 0], [8, 0, 0, 0]], dtype=torch.int32)
    bounds = document_bounds(lengths)
    assert bounds.dtype == torch.int32
    assert bounds.tolist() == [0, 3, 5, 8, 8, 16, 16, 16, 16]
    with FakeTensorMode() as mode:  # which has no numbers to look at
        assert document_bounds(mode.from_tensor(lengths)).shape == (9,)


def recomputing(model: nn.Module) -> None:
    for layer in model.layers.values():
        run_once = layer.forward
        layer.forward = partial(checkpoint, run_once, use_reentrant=False)


def compiling(model: nn.Module) -> None:
    torch._dynamo.reset()
    for layer in model.layers.values():
        layer.compile(backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("how", [lambda model: None, recomputing, compiling])
def test_by_document_a_model_computes_what_it_computes_under_a_mask(how) -> None:
    want, expected = run(make(Decoder))
    assert not CALLS
    model = make(Decoder)
    how(model)
    with kernel_on_the_cpu(torch.float32):
        loss, found = run(model)
        n_calls = 2 * ARGS.n_layers if how is recomputing else ARGS.n_layers
        # Keys are not repeated; of at most 4 documents in each of 3 sequences some are empty.
        assert [(ARGS.n_heads, ARGS.n_kv_heads, 3 * 4)] * n_calls == CALLS
    CALLS.clear()
    assert loss == pytest.approx(want, rel=1e-6)
    assert relative_difference(found, expected) < 1e-5


def test_another_number_of_documents_compiles_nothing_again() -> None:
    model = make(Decoder)
    compiling(model)
    with kernel_on_the_cpu(torch.float32), torch._dynamo.config.patch(error_on_recompile=True):
        for groups in ([[24], [24]], [[3, 4, 5], [20, 4]], [[2] * 12, [1] * 9]):
            rows = [[example_of(n, seed) for seed, n in enumerate(group)] for group in groups]
            inputs, _ = as_batch([join_examples(row, SEQ_LEN, 3) for row in rows])
            given = {name: inputs[name] for name in ("positions", "lengths")}
            found = model(inputs["input"], **given)
            expected = make(Decoder)(inputs["input"], positions=inputs["positions"])
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert [n for _, _, n in CALLS[:: ARGS.n_layers]] == [2 * 2, 2 * 4, 2 * 16]
    CALLS.clear()


def test_numbers_of_16_bits_take_the_kernel_and_others_the_mask() -> None:
    want, expected = run(make(Decoder))
    with kernel_on_the_cpu():
        loss, found = run(make(Decoder))
        assert not CALLS
        in_half, _ = run(make(Decoder), torch.bfloat16)
        assert len(CALLS) == ARGS.n_layers
    CALLS.clear()
    assert loss == want
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert in_half == pytest.approx(want, rel=0.02)
    assert in_half != want


def test_layers_that_need_a_mask_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(
        decoder, "document_mask", lambda positions: made.append(1) or document_mask(positions)
    )
    with kernel_on_the_cpu():
        for n_batches in (1, 2):
            run(make(Decoder))
            assert len(made) == n_batches


def test_without_lengths_there_is_a_mask() -> None:
    inputs, _ = as_batch([(dict(one), labels) for one, labels in PACKED])
    model = make(Decoder)
    want = model(inputs["input"], positions=inputs["positions"])
    with kernel_on_the_cpu(torch.float32):
        assert torch.equal(model(inputs["input"], positions=inputs["positions"]), want)
        assert not CALLS


@pytest.mark.parametrize(
    ("device", "capability", "head_dim", "is_built", "expected"),
    [
        ("cuda:0", (8, 0), 128, True, True),
        ("cuda:0", (9, 0), 64, True, True),
        ("cuda:1", (8, 6), 192, True, True),
        ("cuda:0", (7, 5), 128, True, False),
        ("cuda:0", (9, 0), 256, True, False),
        ("cuda:0", (9, 0), 100, True, False),
        ("cuda:0", (9, 0), 128, False, False),
        ("cpu", (9, 0), 128, True, False),
        ("meta", (9, 0), 128, True, False),
    ],
)
def test_which_devices_have_the_kernel(
    device: str,
    capability: tuple[int, int],
    head_dim: int,
    is_built: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: is_built)
    assert has_document_kernel.__wrapped__(torch.device(device), head_dim) is expected


def test_an_older_torch_is_not_told_of_groups() -> None:
    """2.11 has no such argument; a call with it would end the run."""
    assert decoder._GROUPED == {"enable_gqa": True}
