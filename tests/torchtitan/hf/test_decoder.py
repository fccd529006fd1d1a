"""A packed sequence computes what its examples compute alone: losses and gradients."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torchtitan.models.llama3 import Transformer, TransformerModelArgs

from torchtitan.data.sequences import IGNORE_INDEX, EncodedExample, join_examples
from torchtitan.hf.decoder import (
    Decoder,
    as_decoder,
    document_mask,
    for_packing,
    learns_alone,
)
from torchtitan.settings import JobConfig

VOCABULARY = 31
SEQ_LEN = 24
ARGS = as_decoder(
    TransformerModelArgs(
        dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=VOCABULARY, max_seq_len=SEQ_LEN
    )
)
LENGTHS = [[7, 9, 5], [11, 12], [24]]


def make(model_cls: type, seed: int = 0) -> nn.Module:
    model = model_cls(copy.deepcopy(ARGS))
    torch.manual_seed(seed)
    with torch.no_grad():
        model.init_weights()
        for weight in model.layers.parameters():
            if weight.dim() > 1:
                weight *= 10.0  # as they begin, what a layer adds is too little to tell by
    return model


def test_a_description_of_upstream_will_do() -> None:
    """As a flavor of upstream's has it when a packed run's parts are counted."""
    plain = TransformerModelArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=31)
    made, of_ours = Decoder(plain), Decoder(as_decoder(plain))
    assert torch.equal(made.freqs_cis, of_ours.freqs_cis)
    assert [p.shape for p in made.parameters()] == [p.shape for p in of_ours.parameters()]


def example_of(length: int, seed: int) -> EncodedExample:
    """Random tokens padded to SEQ_LEN, the latter half learned."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (length + 1,), generator=generator)
    ids = torch.zeros(SEQ_LEN, dtype=torch.int64)
    labels = torch.full((SEQ_LEN,), IGNORE_INDEX)
    ids[:length] = tokens[:-1]
    labels[length // 2 : length] = tokens[length // 2 + 1 :]
    return EncodedExample(ids, labels, length, 0)


ROWS = [
    [example_of(n, 100 * i + j) for j, n in enumerate(group)] for i, group in enumerate(LENGTHS)
]
PACKED = [join_examples(group, SEQ_LEN, pad_id=3) for group in ROWS]


def sum_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX
    )


def packed_batch(pick: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
    parts = [(inputs["input"], labels, inputs["positions"]) for inputs, labels in PACKED[pick]]
    ids, labels, positions = map(torch.stack, zip(*parts, strict=True))
    return ids, labels, positions


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def relative_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[n] - right[n]).norm() / right[n].norm()) for n in left)


def alone() -> tuple[list[float], dict[str, Tensor]]:
    """Upstream's model, example by example, without any padding."""
    model = make(Transformer)
    losses = []
    for example in (example for group in ROWS for example in group):
        n = example.n_tokens
        loss = sum_loss(model(example.input_ids[None, :n]), example.labels[None, :n])
        loss.backward()
        losses.append(loss.item())
    return losses, gradients(model)


def together(batches: list[slice], *, positions: bool = True) -> tuple[float, dict[str, Tensor]]:
    model = make(Decoder)
    total = 0.0
    for pick in batches:
        ids, labels, places = packed_batch(pick)
        loss = sum_loss(model(ids, positions=places if positions else None), labels)
        loss.backward()
        total += loss.item()
    return total, gradients(model)


# As one batch, and in batches of one, in which upstream takes another way with positions.
@pytest.mark.parametrize("batches", [[slice(0, 3)], [slice(i, i + 1) for i in range(3)]])
def test_packed_examples_have_the_loss_and_gradients_they_have_alone(batches: list[slice]) -> None:
    losses, expected = alone()
    total, found = together(batches)
    assert total == pytest.approx(sum(losses), rel=1e-5)
    assert relative_difference(found, expected) < 1e-5


def test_without_positions_they_would_not() -> None:
    """Examples that see one another: that the test above can tell."""
    losses, expected = alone()
    total, found = together([slice(0, 3)], positions=False)
    assert total != pytest.approx(sum(losses), rel=1e-4)
    assert relative_difference(found, expected) > 1e-2


def test_no_example_sees_another() -> None:
    model = make(Decoder)
    ids, _, positions = packed_batch(slice(0, 1))
    before = model(ids, positions=positions)
    changed = ids.clone()
    changed[0, :7] = (changed[0, :7] + 1) % VOCABULARY  # the first example
    after = model(changed, positions=positions)
    assert torch.equal(before[0, 7:], after[0, 7:])
    assert not torch.allclose(before[0, :7], after[0, :7])


def test_a_mask_by_hand() -> None:
    mask = document_mask(torch.tensor([[0, 1, 0, 1, 2], [0, 0, 1, 2, 3]]))
    assert mask.shape == (2, 1, 5, 5)
    assert mask[:, 0].int().tolist() == [
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]],
        [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 1, 1, 1, 1]],
    ]


def test_without_positions_it_is_upstreams_model_to_the_last_bit() -> None:
    ours, theirs = make(Decoder), make(Transformer)
    theirs.load_state_dict(ours.state_dict())  # also: the same names
    ids, _, _ = packed_batch()
    assert torch.equal(ours(ids), theirs(ids))


def test_on_the_meta_device_weights_begin_as_upstreams() -> None:
    """As the trainer builds it; runs with and without packing start equal."""
    states = []
    for model_cls in (Decoder, Transformer):
        torch.manual_seed(5)
        with torch.device("meta"):
            model = model_cls(copy.deepcopy(ARGS))
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.init_weights()
        states.append(model.state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_padding_gives_no_nan() -> None:
    model = make(Decoder)
    padding = torch.arange(SEQ_LEN)[None]
    assert bool(model(torch.zeros_like(padding), positions=padding).isfinite().all())


def test_models_that_cannot_read_packed_sequences() -> None:
    assert for_packing(Transformer, "8B", ARGS) == ARGS
    with pytest.raises(ValueError, match=r"data\.packing is true") as error:
        for_packing(Transformer, "8B_flex", replace(ARGS, attn_type="flex"))
    for part in ("'8B_flex'", "'flex'", "use a flavor with 'sdpa'"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match=r"model\.name is not llama3"):
        for_packing(SimpleNamespace, "8B", ARGS)


def test_learned_tokens_are_alone_unless_all_logits_are_asked() -> None:
    config = JobConfig()
    config.training.dataset = "alpaca"
    assert learns_alone(config, TransformerModelArgs())
    config.data.all_logits = True
    assert not learns_alone(config, TransformerModelArgs())
