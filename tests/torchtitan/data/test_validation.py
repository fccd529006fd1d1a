"""Validation in one process: which examples, which average, and no trace of it in training."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchtitan.components.validate as titan_validate
import torchtitan.tools.utils as titan_tools
from torch import Tensor, nn

from tests.torchtitan.helpers.validators import Processor, build_validator
from torchtitan.data import validation as instruct_validation
from torchtitan.data.dataset import InstructDataset
from torchtitan.data.rows.examples import InstructExamples
from torchtitan.data.rows.messages import alpaca_messages
from torchtitan.data.sequences import IGNORE_INDEX
from torchtitan.data.sources import ALL_EXAMPLES, ExampleMixture, ExampleSplit
from torchtitan.data.text.tokenizer import FolderTokenizer
from torchtitan.data.validation import InstructValidator
from torchtitan.settings.job_config import JobConfig

TOKENIZER = FolderTokenizer(str(Path(__file__).parents[2] / "assets" / "tokenizer"))
SEQ_LEN = 32
# Answers of unequal length, the longer ones behind: batches differ in their tokens.
ANSWERS = ["yes", "no", "yes yes", "no no"] + ["no one knows what to say of all this"] * 3


class Model(nn.Module):
    """Looks up each token's prediction, and remembers what it was given; takes tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(TOKENIZER.get_vocab_size(), TOKENIZER.get_vocab_size())
        self.batches: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        assert not self.training
        assert not torch.is_grad_enabled()
        self.batches.append(tokens.clone())
        return self.table(tokens)

    def get_attention_masks(self, **kwargs: Any) -> None:
        raise TypeError("as models of upstream that need no masks")


def sum_loss(prediction: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(
        prediction.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX
    )


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(titan_tools, "device_type", "cpu")


@pytest.fixture
def examples(tmp_path: Path) -> str:
    path = tmp_path / "examples.jsonl"
    entries = [
        {"instruction": f"Say {i}.", "input": "", "output": a} for i, a in enumerate(ANSWERS)
    ]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return str(path)


def build(
    examples: str,
    processor: Any = None,
    split: ExampleSplit = ALL_EXAMPLES,
    n_steps: int = 100,
    counts_padding: bool = False,
    **changes: Any,
) -> InstructValidator:
    config = JobConfig()
    config.report.count_padding = counts_padding
    config.training.steps = n_steps
    settings = {"dataset": "alpaca", "dataset_path": examples, "seq_len": SEQ_LEN}
    for key, value in {**settings, "local_batch_size": 2, **changes}.items():
        setattr(config.validation, key, value)
    return build_validator(
        processor, job_config=config, tokenizer=TOKENIZER, split=split, loss_fn=sum_loss
    )


def mean_loss_by_hand(model: Model, examples: str, indices: range) -> tuple[float, float]:
    """The mean over target tokens, and the mean over batches of two examples, in numpy."""
    entries = [json.loads(line) for line in Path(examples).read_text().splitlines()]
    source = InstructExamples(entries, ((examples, len(entries)),), alpaca_messages)
    dataset = InstructDataset(ExampleMixture([source]), TOKENIZER, SEQ_LEN)
    table = model.table.weight.detach().numpy().astype(np.float64)
    losses = []
    for index in indices:
        example = dataset.encode(index)
        labels = example.labels.numpy()
        logits = table[example.input_ids.numpy()]
        log_probabilities = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        learned = labels != IGNORE_INDEX
        losses.append(-log_probabilities[np.flatnonzero(learned), labels[learned]])
    over_tokens = np.concatenate(losses).mean()
    batches = [np.concatenate(losses[i : i + 2]).mean() for i in range(0, len(losses), 2)]
    return float(over_tokens), float(np.mean(batches))


def test_the_loss_is_the_mean_over_all_target_tokens(examples: str) -> None:
    processor, model = Processor(), Model()
    build(examples, processor).validate([model], step=3)
    over_tokens, over_batches = mean_loss_by_hand(model, examples, range(6))
    ((step, loss, *_),) = processor.logged
    assert step == 3
    assert loss == pytest.approx(over_tokens, rel=1e-6)
    assert abs(over_tokens - over_batches) > 1e-3 * over_tokens, "or the test could not tell"
    assert len(model.batches) == 3, "the seventh example fills no batch"


@pytest.mark.parametrize("counts", [True, False])
def test_padding_counts_where_it_counts_in_training(examples: str, counts: bool) -> None:
    processor, model = Processor(), Model()
    build(examples, processor, counts_padding=counts).validate([model], step=1)
    read = torch.cat(model.batches)
    n_padding = sum(len(row) - 1 - int(row.ne(row[-1]).nonzero().max()) for row in read)
    assert n_padding > len(read), "the last tokens of a row are padding, of which one is none"
    assert processor.logged[0][2] == read.numel() - (0 if counts else n_padding)


def test_every_validation_reads_the_same_examples(examples: str) -> None:
    processor, model = Processor(), Model()
    validator = build(examples, processor, steps=2)
    validator.validate([model], step=1)
    validator.validate([model], step=10)
    first, second, *again = model.batches
    assert not torch.equal(first, second)
    assert torch.equal(torch.stack(again), torch.stack([first, second]))
    assert processor.logged[0][1] == processor.logged[1][1]
    assert processor.logged[0][1] == pytest.approx(mean_loss_by_hand(model, examples, range(4))[0])


def test_more_steps_than_batches_start_over(examples: str) -> None:
    model = Model()
    build(examples, steps=8, local_batch_size=1).validate([model], step=1)
    assert len(model.batches) == 8
    assert torch.equal(model.batches[7], model.batches[0])
    assert not torch.equal(model.batches[6], model.batches[0])


def test_held_out_examples_are_read_and_no_others(examples: str) -> None:
    model, split = Model(), ExampleSplit(0.5, held_out=True)
    build(examples, split=split, local_batch_size=1).validate([model], step=1)
    texts = [TOKENIZER.decode(batch[0].tolist()) for batch in model.batches]
    held_out = split.indices(len(ANSWERS)).tolist()
    assert len(texts) == len(held_out) == 4
    for text, index in zip(texts, held_out, strict=True):
        assert f"Say {index}." in text


def test_the_model_is_left_as_it_was(examples: str) -> None:
    model = Model()
    weights, generator = model.table.weight.clone(), torch.get_rng_state()
    build(examples).validate([model], step=1)
    assert torch.equal(model.table.weight, weights)
    assert model.table.weight.grad is None
    assert model.training
    assert torch.equal(torch.get_rng_state(), generator), "training may draw from it"


def test_speed_of_training_and_of_validation_do_not_mix(
    examples: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, model = SimpleNamespace(now=5000.0), Model()
    monkeypatch.setattr(
        instruct_validation, "time", SimpleNamespace(perf_counter=lambda: clock.now)
    )

    def take_ten_seconds(*args: Any) -> None:
        clock.now += 10.0

    model.register_forward_hook(take_ten_seconds)
    processor = Processor()
    processor.ntokens_since_last_log, processor.time_last_log = 1234, 4900.0
    build(examples, processor).validate([model], step=1)
    ((_, _, n_tokens, since),) = processor.logged
    assert since == 5000.0, "when the validation of three batches began"
    assert clock.now - processor.time_last_log == 100.0, "as many seconds as before"
    assert processor.ntokens_since_last_log == 1234
    # Tokens of the six examples, without padding.
    samples = list(build(examples, local_batch_size=1)._loader)[:6]
    assert n_tokens == sum(int(inputs.n_tokens) for inputs, _ in samples)
    assert n_tokens < 6 * SEQ_LEN


@pytest.mark.parametrize("steps", [-1, 1])
def test_examples_that_fill_no_batch_are_refused(examples: str, steps: int) -> None:
    with pytest.raises(ValueError, match=r"^validation\.local_batch_size is 8, .* only 7 examples"):
        build(examples, steps=steps, local_batch_size=8)
    split = ExampleSplit(0.3, held_out=True)
    with pytest.raises(
        ValueError, match=r"only 2 examples; .* data\.validation_fraction \(it is 0\.3\)"
    ):
        build(examples, steps=steps, split=split, local_batch_size=4)


def test_a_rest_that_fills_no_batch_is_left_out_and_said(
    examples: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    loader = build(examples, steps=-1, local_batch_size=4)._loader
    assert [len(labels) for _, labels in loader] == [4]
    assert "3 of 7 examples do not fill a batch of validation.local_batch_size = 4" in caplog.text


def test_errors_name_the_section(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"^validation\.dataset_path is "):
        build(str(tmp_path / "none.jsonl"))


def test_upstream_is_found_as_it_was_and_warns_of_nothing(
    examples: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = titan_validate.build_text_validation_dataloader
    build(examples)
    assert titan_validate.build_text_validation_dataloader is before
    assert "hangs" not in caplog.text


def test_upstreams_settings_say_when_and_the_last_step_is_always_validated(examples: str) -> None:
    validator = build(examples, freq=5, n_steps=13)
    assert [step for step in range(1, 14) if validator.should_validate(step)] == [1, 5, 10, 13]
