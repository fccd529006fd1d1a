"""The stream of examples: resumed exactly, shared out evenly, nothing dropped in silence."""

import copy
import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.torchtitan.helpers.number_tokenizer import NumberTokenizer, numbered_messages
from torchtitan.data.dataset import InstructDataset
from torchtitan.data.rows.examples import InstructExamples
from torchtitan.data.rows.messages import Conversation, Message, MessageReader
from torchtitan.data.sequences import IGNORE_INDEX
from torchtitan.data.sources import ExampleMixture, ExampleSplit

ASSETS = Path(__file__).parents[2] / "assets"
SEQ_LEN = 8


def make_examples(
    count: int, too_long: set[int] = frozenset(), says: MessageReader = numbered_messages
) -> ExampleMixture:
    """Example i has the prompt 100 + i; those of ``too_long`` have it often enough to fill T."""
    examples = [{"i": i, "prompt": 1 + SEQ_LEN * (i in too_long)} for i in range(count)]
    return ExampleMixture([InstructExamples(examples, (("examples.jsonl", count),), says)])


def make(count: int, too_long: set[int] = frozenset(), **kwargs: Any) -> InstructDataset:
    examples = make_examples(count, too_long)
    return InstructDataset(examples, NumberTokenizer(), SEQ_LEN, **kwargs)


def numbers(stream: Iterator[Any], count: int | None = None) -> list[int]:
    """Which examples come out."""
    return [int(inputs["input"][0]) - 100 for inputs, _ in itertools.islice(stream, count)]


def test_what_a_sample_looks_like() -> None:
    inputs, labels = next(iter(make(3)))
    assert inputs["input"].tolist() == [100, 7, 1, 1, 1, 1, 1, 1]
    assert labels.tolist() == [7, 1, *[IGNORE_INDEX] * 6]
    assert inputs["n_tokens"].shape == ()
    assert inputs["n_tokens"].item() == 2
    assert inputs["input"].dtype == inputs["n_tokens"].dtype == labels.dtype == torch.int64


def test_a_sample_names_its_row_of_the_data_set() -> None:
    """Also where examples are dropped, and whatever their order and reader."""
    readers = [
        make(10, too_long={0, 4}, shuffle_seed=3, dp_rank=rank, dp_world_size=2) for rank in (0, 1)
    ]
    for reader in readers:
        for inputs, _ in itertools.islice(reader, 25):
            assert inputs["rows"].shape == ()
            assert inputs["rows"].item() == int(inputs["input"][0]) - 100


def test_order_without_shuffling() -> None:
    assert numbers(iter(make(3)), 7) == [0, 1, 2, 0, 1, 2, 0]
    assert numbers(iter(make(3, infinite=False))) == [0, 1, 2]


def test_each_epoch_is_another_permutation() -> None:
    stream = numbers(iter(make(50, shuffle_seed=3)), 150)
    epochs = [stream[:50], stream[50:100], stream[100:]]
    for epoch in epochs:
        assert sorted(epoch) == list(range(50))
    assert len({tuple(epoch) for epoch in [*epochs, list(range(50))]}) == 4
    assert numbers(iter(make(50, shuffle_seed=3)), 150) == stream
    assert numbers(iter(make(50, shuffle_seed=4)), 150) != stream


@given(
    count=st.integers(1, 40),
    world_size=st.integers(1, 5),
    seed=st.none() | st.integers(0, 9),
    too_long=st.sets(st.integers(0, 39), max_size=5),
)
def test_ranks_partition_the_examples(
    count: int, world_size: int, seed: int | None, too_long: set[int]
) -> None:
    fitting = set(range(count)) - too_long
    each = len(fitting) // world_size
    ranks = [
        make(
            count,
            too_long,
            dp_rank=rank,
            dp_world_size=world_size,
            shuffle_seed=seed,
            infinite=False,
        )
        for rank in range(world_size)
    ]
    if each == 0:
        with pytest.raises(ValueError, match=r"usable examples, fewer than|none of"):
            list(ranks[0])
        return
    fractions = [numbers(iter(rank)) for rank in ranks]
    assert {len(fraction) for fraction in fractions} == {each}, (
        "or one rank waits for another for ever"
    )
    examples = [example for fraction in fractions for example in fraction]
    assert len(set(examples)) == len(examples) == each * world_size
    assert set(examples) <= fitting


@given(
    count=st.integers(4, 12),
    world_size=st.integers(1, 3),
    seed=st.none() | st.integers(0, 9),
    infinite=st.booleans(),
    position=st.integers(0, 40),
    too_long=st.sets(st.integers(0, 11), max_size=2),
    data=st.data(),
)
def test_a_resumed_stream_is_the_stream_that_never_stopped(
    count: int,
    world_size: int,
    seed: int | None,
    infinite: bool,
    position: int,
    too_long: set[int],
    data: st.DataObject,
) -> None:
    count += len(too_long) * world_size  # so that every rank has an example that fits
    rank = data.draw(st.integers(0, world_size - 1))
    kwargs = {"dp_rank": rank, "dp_world_size": world_size, "shuffle_seed": seed}
    kwargs["infinite"] = infinite
    whole = numbers(iter(make(count, too_long, **kwargs)), 60)
    position = min(position, len(whole))

    first = make(count, too_long, **kwargs)
    stream = iter(first)
    assert numbers(stream, position) == whole[:position]
    state = json.loads(json.dumps(first.state_dict()))
    second = make(count, too_long, **kwargs)
    second.load_state_dict(state)
    assert second.state_dict() == state
    rest = len(whole) - position
    assert numbers(iter(second), rest) == whole[position:]
    # Two stops with nothing between them are one.
    third = make(count, too_long, **kwargs)
    third.load_state_dict(state)
    fourth = make(count, too_long, **kwargs)
    fourth.load_state_dict(third.state_dict())
    assert numbers(iter(fourth), rest) == whole[position:]


def test_iterating_anew_starts_at_the_first_example() -> None:
    data = make(5, infinite=False, shuffle_seed=1)
    once = numbers(iter(data))
    assert numbers(iter(data), 2) == once[:2], "a second validation sees the same examples"
    assert numbers(iter(data)) == once, "also after one that was left early"


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({"count": 6}, "examples"),
        ({"shuffle_seed": 2}, "shuffle_seed"),
        ({"infinite": False}, "infinite"),
        ({"split": ExampleSplit(0.2)}, "validation_fraction"),
    ],
)
def test_a_state_of_other_data_is_refused(kwargs: dict[str, Any], name: str) -> None:
    state = make(5).state_dict()
    with pytest.raises(ValueError, match=rf"has {name} = .*checkpoint\.exclude_from_loading"):
        make(**{"count": 5, **kwargs}).load_state_dict(state)


def test_which_part_of_the_examples_is_read_belongs_to_the_state() -> None:
    state = make(5, split=ExampleSplit(0.4)).state_dict()
    with pytest.raises(ValueError, match="has held_out = False, this run has True"):
        make(5, split=ExampleSplit(0.4, held_out=True)).load_state_dict(state)
    with pytest.raises(ValueError, match=r"has validation_fraction = 0\.0, this run has 0\.2"):
        make(5, split=ExampleSplit(0.2)).load_state_dict(make(5).state_dict())


def test_an_epoch_has_the_examples_of_its_split() -> None:
    assert make(5).n_examples_of_epoch == 5
    assert make(5, split=ExampleSplit(0.4)).n_examples_of_epoch == 3
    assert make(5, split=ExampleSplit(0.4, held_out=True)).n_examples_of_epoch == 2


@pytest.mark.parametrize("infinite", [True, False])
def test_training_and_validation_read_parts_that_do_not_meet(infinite: bool) -> None:
    held_out = numbers(iter(make(20, {3}, split=ExampleSplit(0.3, held_out=True), infinite=False)))
    data = make(20, {3}, split=ExampleSplit(0.3), shuffle_seed=1, infinite=infinite)
    trained = numbers(iter(data), 40 if infinite else None)
    assert set(trained) | set(held_out) == set(range(20)) - {3}
    assert not set(trained) & set(held_out)
    assert len(held_out) in (5, 6)


def test_ranks_fraction_the_held_out_examples() -> None:
    split = ExampleSplit(0.5, held_out=True)
    whole = numbers(iter(make(12, split=split, infinite=False)))
    fractions = [
        numbers(iter(make(12, split=split, infinite=False, dp_rank=rank, dp_world_size=2)))
        for rank in range(2)
    ]
    assert [example for pair in zip(*fractions, strict=True) for example in pair] == whole


def test_examples_whose_answer_is_cut_off_are_dropped_and_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    stream = iter(make(5, {1, 4}))
    assert numbers(stream, 3) == [0, 2, 3]
    assert "dropped" not in caplog.text, "reported once, at the end of the pass"
    assert numbers(stream, 3) == [0, 2, 3]
    messages = [record.getMessage() for record in caplog.records if "dropped" in record.msg]
    assert messages == [
        "epoch 0 of rank 0: 2 of 5 examples dropped, because none of their answer lies within "
        "training.seq_len = 8; raise training.seq_len to keep them"
    ]


def test_a_finite_stream_reports_drops_before_it_starts(caplog: pytest.LogCaptureFixture) -> None:
    data = make(5, {1, 4}, infinite=False, section="validation")
    assert numbers(iter(data)) == [0, 2, 3]
    assert numbers(iter(data)) == [0, 2, 3]
    messages = [record.getMessage() for record in caplog.records if "dropped" in record.msg]
    assert len(messages) == 1
    assert messages[0].startswith("the data set: 2 of 5 examples dropped")
    assert "raise validation.seq_len" in messages[0]


def test_examples_that_are_cut_but_learned_in_part_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    def long_answer(example: dict[str, Any]) -> Conversation:
        return Conversation([Message("user", "100"), Message("assistant", "7 " * 20)])

    examples = make_examples(3, says=long_answer)
    assert len(list(InstructDataset(examples, NumberTokenizer(), 8, infinite=False))) == 3
    assert "epoch 0 of rank 0: 3 of 3 examples cut at training.seq_len = 8" in caplog.text


@pytest.mark.parametrize("infinite", [True, False])
def test_dropping_every_example_is_an_error(infinite: bool) -> None:
    with pytest.raises(ValueError, match=r"none of 3 examples .* = 8; raise training\.seq_len"):
        next(iter(make(3, {0, 1, 2}, infinite=infinite)))


def test_fewer_examples_than_readers_are_refused() -> None:
    with pytest.raises(ValueError, match="3 usable examples, fewer than the 4 readers"):
        next(iter(make(3, dp_world_size=4)))


def test_a_tokenizer_without_end_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = NumberTokenizer()
    tokenizer.eos_id = None
    InstructDataset(make_examples(1), tokenizer, 8)
    assert "no end token (eos_token in tokenizer_config.json)" in caplog.text


# --- the loader -----------------------------------------------------------------------------------


@given(
    count=st.integers(3, 12),
    world_size=st.integers(1, 3),
    seed=st.none() | st.integers(0, 9),
    seen=st.integers(1, 40),
    n=st.integers(0, 30),
    infinite=st.booleans(),
)
def test_a_reader_tells_what_it_will_hand_out(
    count: int, world_size: int, seed: int | None, seen: int, n: int, infinite: bool
) -> None:
    """Over the ends of epochs; asking neither moves it nor changes what a checkpoint holds."""
    rank = {"dp_world_size": world_size, "dp_rank": world_size - 1}
    kwargs = {**rank, "shuffle_seed": seed, "infinite": infinite}
    expected = numbers(iter(make(count, **kwargs)), seen + n)[seen:]
    asked, resumed = make(count, **kwargs), make(count, **kwargs)
    stream = iter(asked)
    numbers(stream, seen)
    state = copy.deepcopy(asked.state_dict())
    assert asked.upcoming(n) == expected
    assert asked.state_dict() == state
    assert numbers(stream, n) == expected
    resumed.load_state_dict(state)
    assert resumed.upcoming(n) == expected
    assert numbers(iter(resumed), n) == expected


def test_an_example_that_was_dropped_before_is_not_told() -> None:
    data = make(6, too_long={1, 4})
    stream = iter(data)
    assert numbers(stream, 3) == [0, 2, 3]
    assert data.upcoming(6) == [4, 5, 0, 2, 3, 4]  # nobody has looked at 4 yet
    assert numbers(stream, 2) == [5, 0]
    assert data.upcoming(6) == numbers(stream, 6) == [2, 3, 5, 0, 2, 3]


def test_a_stream_that_ends_tells_no_more_than_it_has() -> None:
    data = make(7, infinite=False)
    stream = iter(data)
    assert numbers(stream, 4) == [0, 1, 2, 3]
    assert data.upcoming(2) == [4, 5]
    assert data.upcoming(10) == [4, 5, 6] == numbers(stream)
    assert data.upcoming(10) == []
