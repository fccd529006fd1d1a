"""Validation on packed examples: the loss that the same examples have alone, for any readers."""

import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchtitan.tools.utils as titan_tools
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchtitan.models.llama3 import Transformer, TransformerModelArgs

from tests.torchtitan.helpers.number_tokenizer import NumberTokenizer, numbered_examples
from tests.torchtitan.helpers.validators import Processor, build_validator
from torchtitan.data.dataset import InstructDataset, PackedOnce
from torchtitan.data.sequences import IGNORE_INDEX, Inputs
from torchtitan.data.sources import ExampleSplit
from torchtitan.data.text.tokenizer import FolderTokenizer
from torchtitan.data.validation import InstructValidator
from torchtitan.hf.decoder import Decoder, as_decoder
from torchtitan.settings.job_config import JobConfig

ASSETS = Path(__file__).parents[2] / "assets"
TOKENIZER = FolderTokenizer(str(ASSETS / "tokenizer"))
SEQ_LEN = 128
HELD_OUT = ExampleSplit(0.025, held_out=True)  # 30 examples
ARGS = TransformerModelArgs(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2,
    vocab_size=TOKENIZER.get_vocab_size(), max_seq_len=SEQ_LEN,
)  # fmt: skip


class LossOfBatches:
    """Sums the losses of targets over all batches, and counts both."""

    def __init__(self) -> None:
        self.total, self.n_targets, self.n_batches = 0.0, 0, 0

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX
        )
        self.total += loss.item()
        self.n_targets += int((labels != IGNORE_INDEX).sum())
        self.n_batches += 1
        return loss


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(titan_tools, "device_type", "cpu")


def build(
    *,
    packing: bool,
    loss_fn: Any = None,
    processor: Any = None,
    workers: int = 0,
    split: ExampleSplit = HELD_OUT,
    rank: tuple[int, int] = (0, 1),
    **changes: Any,
) -> InstructValidator:
    config = JobConfig()
    config.data.packing = packing
    config.validation.dataloader.num_workers = workers
    place = {"dataset": "alpaca", "dataset_path": str(ASSETS / "tiny_instruct")}
    for key, value in {**place, "seq_len": SEQ_LEN, "local_batch_size": 1, **changes}.items():
        setattr(config.validation, key, value)
    return build_validator(
        processor,
        job_config=config,
        dp_rank=rank[0],
        dp_world_size=rank[1],
        tokenizer=TOKENIZER,
        split=split,
        loss_fn=loss_fn or LossOfBatches(),
    )


def model_of(model_cls: type) -> nn.Module:
    """A model with the same weights whatever its class."""
    model: nn.Module = model_cls(ARGS if model_cls is Transformer else as_decoder(ARGS))
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(torch.device("cpu"))
        for weight in model.layers.parameters():
            if weight.dim() > 1:
                weight *= 10.0  # so that a token that sees too much tells
    return model


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_loss_is_that_of_the_examples_alone(workers: int) -> None:
    alone, packed = LossOfBatches(), LossOfBatches()
    ours, expected = Processor(), Processor()
    build(packing=False, loss_fn=alone, processor=expected).validate([model_of(Transformer)], 1)
    validator = build(
        packing=True, loss_fn=packed, processor=ours, workers=workers, local_batch_size=4
    )
    validator.validate([model_of(Decoder)], 1)
    assert packed.n_targets == alone.n_targets > 500
    assert packed.total == pytest.approx(alone.total, rel=1e-5)
    (_, loss, n_tokens, _), (_, expected_loss, expected_tokens, _) = ours.logged + expected.logged
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert n_tokens == expected_tokens, "padding is not counted"
    assert 4 * packed.n_batches < alone.n_batches == 30, "or nothing was packed"


def test_with_one_attention_over_all_the_loss_would_be_another() -> None:
    """So the test above can tell."""
    packed, blind = LossOfBatches(), LossOfBatches()
    build(packing=True, loss_fn=packed).validate([model_of(Decoder)], 1)
    validator = build(packing=True, loss_fn=blind)
    batches = [
        (Inputs({"input": inputs["input"], "n_tokens": inputs.n_tokens}), labels)
        for inputs, labels in validator._loader
    ]
    validator._loader = batches  # type: ignore[assignment]
    validator.validate([model_of(Decoder)], 1)
    assert abs(blind.total - packed.total) > 1e-4 * packed.total


def test_positions_go_to_every_stage() -> None:
    validator = build(packing=True)
    inputs, labels = next(iter(validator._loader))
    tokens, _, first, every = validator.post_dataloading_process(
        inputs, labels, [model_of(Decoder)]
    )
    assert torch.equal(tokens, inputs["input"])
    assert "positions" not in first
    assert torch.equal(every["positions"], inputs["positions"])


def test_a_batch_of_padding_alone_counts_for_nothing() -> None:
    """Two workers take batches in turn, so that the second of them may have nothing to read."""
    split, processor, seen = ExampleSplit(1 / 1210, held_out=True), Processor(), LossOfBatches()
    validator = build(packing=True, workers=2, split=split, loss_fn=seen, processor=processor)
    labels = [labels for _, labels in validator._loader]
    assert [bool((one != IGNORE_INDEX).any()) for one in labels] == [True, False]
    validator.validate([model_of(Decoder)], 1)
    assert seen.n_batches == 1
    assert processor.logged[0][1] == pytest.approx(seen.total / seen.n_targets, rel=1e-6)


def test_steps_say_how_many_batches_are_read(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = model_of(Decoder)
    whole = [labels for _, labels in build(packing=True, local_batch_size=2)._loader]
    assert len(whole) > 3
    for steps in (1, 3, len(whole) + 2):
        seen: list[Tensor] = []

        def loss(logits: Tensor, labels: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(labels)
            return logits.sum()

        build(packing=True, loss_fn=loss, steps=steps, local_batch_size=2).validate([model], 1)
        expected = list(itertools.islice(itertools.cycle(whole), steps))
        assert all(map(torch.equal, seen, expected))
        assert len(seen) == steps
    assert "Validation reads 2 packed sequences for each reader" in caplog.text


def test_no_more_is_encoded_than_steps_need(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    real = InstructDataset.encode
    monkeypatch.setattr(
        InstructDataset, "encode", lambda self, index: encoded.append(index) or real(self, index)
    )
    build(packing=True, steps=1, split=ExampleSplit(0.5, held_out=True))
    assert 0 < len(encoded) <= 128, "of 605"


def test_examples_that_no_sequence_holds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"none of 30 examples .* validation\.seq_len = 2"):
        build(packing=True, seq_len=2)
    with pytest.raises(ValueError, match="0 usable examples, fewer than the 1 readers"):
        build(packing=True, split=ExampleSplit(0.0001, held_out=True))


# --- any readers ----------------------------------------------------------------------------------

SMALL = 12
PROMPTS = st.lists(st.integers(1, SMALL + 2), min_size=1, max_size=30).filter(
    lambda prompts: min(prompts) <= SMALL
)


def make(prompts: list[int], window: int, multiple: int, rank: int = 0, n: int = 1) -> PackedOnce:
    """A prompt of n tokens makes n + 1 inputs, and no target where n is above SMALL."""
    place = {"dp_rank": rank, "dp_world_size": n}
    packed = InstructDataset(
        numbered_examples(prompts), NumberTokenizer(), SMALL, packing=True, **place
    )
    packed._window = window
    return PackedOnce(packed, multiple)


def examples_in(samples: Iterator[Any]) -> list[list[int]]:
    """Which examples each sequence holds, told by the first token of each."""
    found = []
    for inputs, labels in samples:
        n = int(inputs["n_tokens"])
        starts = (inputs["positions"][:n] == 0).nonzero().flatten()
        assert n or bool((labels == IGNORE_INDEX).all())
        found.append((inputs["input"][starts] - 100).tolist())
    return found


@given(
    prompts=PROMPTS, window=st.integers(1, 8), n_readers=st.integers(1, 4), size=st.integers(1, 3)
)
def test_every_example_comes_once_in_the_same_sequences(
    prompts: list[int], window: int, n_readers: int, size: int
) -> None:
    whole = examples_in(iter(make(prompts, window, 1)))
    kept = [i for i, length in enumerate(prompts) if length <= SMALL]
    assert sorted(itertools.chain(*whole)) == kept
    parts = [
        examples_in(iter(make(prompts, window, n_readers * size, rank, n_readers)))
        for rank in range(n_readers)
    ]
    assert len({len(part) for part in parts}) == 1
    assert len(parts[0]) % size == 0, "full batches"
    dealt = [sequence for together in zip(*parts, strict=True) for sequence in together]
    assert dealt[: len(whole)] == whole
    assert not any(dealt[len(whole) :])
    assert len(dealt) - len(whole) < n_readers * size


@given(prompts=PROMPTS, position=st.integers(0, 10), n_readers=st.integers(1, 3))
def test_it_resumes_for_any_number_of_readers(
    prompts: list[int], position: int, n_readers: int
) -> None:
    first = make(prompts, 4, 6)
    whole = examples_in(iter(make(prompts, 4, 6)))
    stream = iter(first)
    assert examples_in(itertools.islice(stream, position)) == whole[:position]
    state = json.loads(json.dumps(first.state_dict()))
    again = make(prompts, 4, 6)
    again.load_state_dict(state)
    assert examples_in(iter(again)) == whole[position:]
    rest = []
    for rank in range(n_readers):
        other = make(prompts, 4, 6, rank, n_readers)
        other.go_on(other.remaining([state]))
        rest.append(examples_in(iter(other)))
    dealt = [sequence for together in zip(*rest, strict=True) for sequence in together]
    assert dealt == whole[position:][: len(dealt)]
    assert len(whole[position:]) - len(dealt) < n_readers
