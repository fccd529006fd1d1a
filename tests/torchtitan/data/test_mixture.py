"""Several sources in one epoch: as often as their weights say, resumable, with rows of one name."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.torchtitan.helpers.number_tokenizer import NumberTokenizer
from torchtitan.data.dataset import InstructDataset
from torchtitan.data.rows.examples import InstructExamples
from torchtitan.data.rows.messages import Conversation, Message
from torchtitan.data.sources import ALL_EXAMPLES, ExampleMixture, ExampleSplit


def messages(example: dict[str, Any]) -> Conversation:
    return Conversation([Message("user", str(example["i"])), Message("assistant", "7")])


def mixture(counts: list[int], weights: list[float]) -> ExampleMixture:
    """Example i of source s says 1000 s + 100 + i."""
    sources = [
        InstructExamples(
            [{"i": 1000 * s + 100 + i} for i in range(count)], ((f"{s}.jsonl", count),), messages
        )
        for s, count in enumerate(counts)
    ]
    return ExampleMixture(sources, weights)


def make(counts: list[int], weights: list[float], **kwargs: Any) -> InstructDataset:
    return InstructDataset(mixture(counts, weights), NumberTokenizer(), 4, **kwargs)


def test_each_example_knows_its_source() -> None:
    mixed = mixture([3, 1, 2], [1, 1, 1])
    said = [mixed.read(i, lambda found: int(found.messages[0].content)) for i in range(len(mixed))]
    assert said == [100, 101, 102, 1100, 2100, 2101]
    with pytest.raises(IndexError):
        mixed.read(6, lambda found: found)


def test_an_epoch_by_hand() -> None:
    epoch = mixture([2, 4, 3], [2, 0.5, 1]).epoch(ALL_EXAMPLES).tolist()
    assert epoch[:4] == [0, 1, 0, 1]
    assert len(epoch) == 4 + 2 + 3
    half = epoch[4:6]
    assert half == sorted(set(half))
    assert set(half) <= {2, 3, 4, 5}
    assert epoch[6:] == [6, 7, 8]


@given(
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    data=st.data(),
    fraction=st.sampled_from([0.0, 0.2, 0.4]),
)
def test_every_source_comes_as_often_as_its_weight_says(
    counts: list[int], data: st.DataObject, fraction: float
) -> None:
    weight = st.sampled_from([0.3, 0.5, 1.0, 1.5, 2.0, 3.25])
    weights = [data.draw(weight) for _ in counts]
    mixed = mixture(counts, weights)
    split = ExampleSplit(fraction)
    trained = split.indices(len(mixed)).tolist()
    held_out = ExampleSplit(fraction, held_out=True)
    assert sorted(mixed.epoch(held_out).tolist()) == sorted(held_out.indices(len(mixed)).tolist())
    ends = list(itertools.accumulate(counts))
    own = [[i for i in trained if end - n <= i < end] for n, end in zip(counts, ends, strict=True)]
    if not any(round(w % 1 * len(o)) + int(w) * len(o) for w, o in zip(weights, own, strict=True)):
        with pytest.raises(ValueError, match=r"data\.weights are .* no example is left"):
            mixed.epoch(split)
        return
    times = Counter(mixed.epoch(split).tolist())
    assert set(times) <= set(trained), "what is held out is never trained on"
    for rows, w in zip(own, weights, strict=True):
        assert {times[row] for row in rows} <= {int(w), int(w) + (w != int(w))}
        assert sum(times[row] for row in rows) == int(w) * len(rows) + round(w % 1 * len(rows))


def test_weights_of_one_change_nothing() -> None:
    mixed = mixture([5, 3], [1, 1])
    assert mixed.mixed_as is None
    assert mixed.epoch(ExampleSplit(0.25)).tolist() == ExampleSplit(0.25).indices(8).tolist()


def rows_of(dataset: InstructDataset, count: int) -> list[int]:
    return [int(inputs["rows"]) for inputs, _ in itertools.islice(dataset, count)]


def test_a_row_has_one_number_however_often_it_comes() -> None:
    dataset = make([3, 2], [2, 1], shuffle_seed=1)
    for inputs, _ in itertools.islice(dataset, 24):
        row, said = int(inputs["rows"]), int(inputs["input"][0])
        assert said == (100 + row if row < 3 else 1100 + row - 3)
    assert Counter(rows_of(make([3, 2], [2, 1], shuffle_seed=1), 8)) == {
        0: 2,
        1: 2,
        2: 2,
        3: 1,
        4: 1,
    }


@pytest.mark.parametrize("fixed_shards", [False, True])
@pytest.mark.parametrize("position", [0, 3, 7, 19])
def test_a_mixed_stream_resumes_bit_for_bit(position: int, fixed_shards: bool) -> None:
    kwargs = {"dp_rank": 1, "dp_world_size": 2, "shuffle_seed": 5, "fixed_shards": fixed_shards}
    dataset = make([5, 4], [1.5, 2], **kwargs)
    stream = iter(dataset)
    for _ in range(position):
        next(stream)
    state = dataset.state_dict()
    resumed = make([5, 4], [1.5, 2], **kwargs)
    resumed.load_state_dict(state)
    for (inputs, labels), (again, same) in itertools.islice(zip(stream, resumed, strict=False), 30):
        assert torch.equal(inputs["input"], again["input"])
        assert inputs["rows"] == again["rows"]
        assert torch.equal(labels, same)


@given(
    counts=st.lists(st.integers(2, 9), min_size=1, max_size=3),
    readers=st.integers(2, 3),
    seed=st.none() | st.integers(0, 5),
)
def test_readers_keep_their_parts_where_rows_come_several_times(
    counts: list[int], readers: int, seed: int | None
) -> None:
    weights = [2.0, *[1.5] * (len(counts) - 1)]
    own = [
        make(
            counts, weights, dp_rank=r, dp_world_size=readers, shuffle_seed=seed, fixed_shards=True
        )
        for r in range(readers)
    ]
    n = len(mixture(counts, weights).epoch(ALL_EXAMPLES))
    want = Counter(mixture(counts, weights).epoch(ALL_EXAMPLES).tolist())
    taken = [rows_of(dataset, 3 * n) for dataset in own]
    # Numbers of the stream are dealt in turn, so an epoch is n of them.
    together = [row for step in zip(*taken, strict=True) for row in step]
    for epoch in range(3):
        assert Counter(together[epoch * n : (epoch + 1) * n]) == want
    if n % readers == 0:
        each = n // readers
        for rows in taken:
            first = Counter(rows[:each])
            assert all(Counter(rows[k * each : (k + 1) * each]) == first for k in range(3))


def test_a_state_of_another_mixture_is_refused() -> None:
    state = make([3, 2], [2, 1]).state_dict()
    with pytest.raises(
        ValueError, match=r"has weights = \[\[3, 2\], \[2, 1\]\], this run has None"
    ):
        make([3, 2], [1, 1]).load_state_dict(state)
    # Same numbers from other sources.
    with pytest.raises(ValueError, match="has weights"):
        make([2, 3], [2, 1]).load_state_dict(state)


def test_a_state_of_a_former_version_resumes() -> None:
    begun, resumed = make([4], [1]), make([4], [1])
    assert rows_of(begun, 3) == [0, 1, 2]
    state = begun.state_dict()
    del state["weights"], state["template"]
    resumed.load_state_dict(state)
    assert rows_of(resumed, 1) == [3]


SHARES = st.floats(0.0, 0.95)


@given(n_examples=st.integers(20, 500), fraction=SHARES)
def test_the_two_parts_are_disjoint_and_complete(n_examples: int, fraction: float) -> None:
    trained = ExampleSplit(fraction).indices(n_examples).tolist()
    held_out = ExampleSplit(fraction, held_out=True).indices(n_examples).tolist()
    assert sorted(trained + held_out) == list(range(n_examples))
    assert trained == sorted(trained), "in the order of the data set"
    assert abs(len(held_out) - fraction * n_examples) <= 0.5


@given(n_examples=st.integers(20, 500), fractions=st.tuples(SHARES, SHARES))
def test_a_smaller_fraction_lies_within_a_larger_one(
    n_examples: int, fractions: tuple[float, float]
) -> None:
    small, large = (ExampleSplit(s, held_out=True).indices(n_examples) for s in sorted(fractions))
    assert set(small.tolist()) <= set(large.tolist())


def test_held_out_examples_are_always_the_same_and_from_everywhere() -> None:
    examples = ExampleSplit(0.25, held_out=True).indices(1000)
    assert examples.tolist() == ExampleSplit(0.25, held_out=True).indices(1000).tolist()
    # Each hundred examples has about 25: four standard deviations of the hypergeometric law are 16.
    per_hundred = np.bincount(examples // 100, minlength=10)
    assert per_hundred.min() >= 9
    assert per_hundred.max() <= 41
    # And so have the first hundred of them, which a short validation reads.
    assert np.bincount(examples[:100] // 500, minlength=2).min() >= 30


def test_without_a_fraction_everything_is_trained_on() -> None:
    assert ALL_EXAMPLES.indices(4).tolist() == [0, 1, 2, 3]
    assert ExampleSplit(0.0, held_out=True).indices(4).tolist() == []
    assert ALL_EXAMPLES.indices(4).dtype == np.int64


@pytest.mark.parametrize("held_out", [True, False])
def test_a_fraction_that_leaves_nothing_to_train_on_is_refused(held_out: bool) -> None:
    with pytest.raises(ValueError, match=r"validation_fraction is 0\.9, .* all of 4 examples"):
        ExampleSplit(0.9, held_out).indices(4)
