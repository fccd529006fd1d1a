"""Where some readers stop any number of others goes on: no example is lost, none comes twice."""

import itertools
import json
import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.torchtitan.helpers.loaders import ASSETS, build_loader
from tests.torchtitan.helpers.number_tokenizer import NumberTokenizer, numbered_examples
from torchtitan.data.dataset import InstructDataset
from torchtitan.data.sources import DataSource
from torchtitan.data.stream import (
    EpochOrder,
    ExampleStream,
    ReaderPlace,
    ShardAssignment,
    in_parts,
    remaining,
)

SEQ_LEN = 12


def make(prompts: list[int], reader: int = 0, n_readers: int = 1, **kwargs: Any) -> InstructDataset:
    """Example i says 100 + i, ``prompts[i]`` times: more than SEQ_LEN times, and no answer fits."""
    window = kwargs.pop("window", None)
    data = InstructDataset(
        numbered_examples(prompts),
        NumberTokenizer(),
        SEQ_LEN,
        dp_rank=reader,
        dp_world_size=n_readers,
        packing=window is not None,
        **kwargs,
    )
    data._window = window or 1
    return data


def examples_in(inputs: dict[str, torch.Tensor]) -> list[int]:
    """Which examples a sequence holds, in order; each begins where positions do."""
    ids = inputs["input"][: int(inputs["n_tokens"])].tolist()
    starts = inputs.get("positions", torch.arange(SEQ_LEN))[: len(ids)] == 0
    return [ids[place] - 100 for place in starts.nonzero().flatten().tolist()]


def taken(data: InstructDataset, count: int) -> list[int]:
    stream = itertools.islice(iter(data), count)
    return [example for inputs, _ in stream for example in examples_in(inputs)]


def saved(data: InstructDataset) -> dict[str, Any]:
    return json.loads(json.dumps(data.state_dict()))


def readers_of(prompts: list[int], n_readers: int, **kwargs: Any) -> list[InstructDataset]:
    return [make(prompts, reader, n_readers, **kwargs) for reader in range(n_readers)]


@pytest.mark.slow
@given(
    prompts=st.lists(st.integers(1, SEQ_LEN + 2), min_size=5, max_size=14),
    seed=st.none() | st.integers(0, 9),
    window=st.none() | st.integers(1, 5),
    runs=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=5), min_size=1, max_size=4),
    parted=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_readers_that_come_and_go_read_every_example_once_an_epoch(
    prompts: list[int],
    seed: int | None,
    window: int | None,
    runs: list[list[int]],
    parted: list[bool],
) -> None:
    """Each run has as many readers as it has numbers, and each reader hands out that much.

    In some of the runs readers keep their parts.
    """
    fitting = [i for i, prompt in enumerate(prompts) if prompt <= SEQ_LEN]
    if not fitting:
        return
    kwargs: dict[str, Any] = {"shuffle_seed": seed, "window": window}
    read: Counter[int] = Counter()
    states: list[dict[str, Any]] = []
    for counts, fixed_shards in zip(runs, parted, strict=False):
        readers = readers_of(prompts, len(counts), fixed_shards=fixed_shards, **kwargs)
        if states:
            stream = readers[0].remaining(states)
            for reader in readers:
                reader.go_on(stream)
        for reader, count in zip(readers, counts, strict=True):
            # A reader all of whose examples are too long ends with an error, as it should.
            try:
                read.update(taken(reader, count))
            except ValueError:
                return
        states = [saved(reader) for reader in readers]
    last = make(prompts, fixed_shards=parted[-1], **kwargs)
    last.go_on(last.remaining(states))
    numbers = [last._stream.start - 1, *last._stream.left]
    n_epochs = 2 + max(numbers) // len(prompts)
    stream = iter(last)
    while read.total() < n_epochs * len(fitting):
        read.update(examples_in(next(stream)[0]))
    assert read == dict.fromkeys(fitting, n_epochs)


def read_by_each(count: int, n_readers: int, n_epochs: int, **kwargs: Any) -> list[list[set[int]]]:
    """Return for each reader what it reads in each epoch of ``count`` times ``n_readers``."""
    readers = readers_of([1] * count * n_readers, n_readers, fixed_shards=True, **kwargs)
    streams = [iter(taken(reader, count * n_epochs)) for reader in readers]
    return [[set(itertools.islice(s, count)) for _ in range(n_epochs)] for s in streams]


@pytest.mark.parametrize("seed", [None, 3])
def test_parts_come_again_in_every_epoch(seed: int | None) -> None:
    for epochs in read_by_each(5, 3, 4, shuffle_seed=seed):
        assert len(epochs[0]) == 5
        assert all(epoch == epochs[0] for epoch in epochs)


def test_parts_are_shuffled_anew() -> None:
    reader = make([1] * 20, 1, 2, fixed_shards=True, shuffle_seed=3)
    read = taken(reader, 40)
    epochs = [read[i : i + 10] for i in range(0, 40, 10)]
    assert len(set(map(tuple, epochs))) == 4
    assert epochs[0] == taken(make([1] * 20, 1, 2, shuffle_seed=3), 10), "as without parts"


@pytest.mark.slow
def test_one_rank_has_the_order_that_it_has_without_parts() -> None:
    """Whatever workers it has."""
    for workers in (0, 2):
        plain, parted = (build(0, 1, workers, fixed_shards=k) for k in (False, True))
        assert texts(iter(parted), 80) == texts(iter(plain), 80), "beyond an epoch"


@given(
    count=st.integers(4, 40),
    n_readers=st.integers(1, 4),
    seed=st.none() | st.integers(0, 9),
    left=st.integers(0, 30),
)
@pytest.mark.slow
def test_examples_that_change_their_reader_are_fewer_than_the_readers(
    count: int, n_readers: int, seed: int | None, left: int
) -> None:
    """Also where other readers have begun: from the next epoch on, every one of them once."""
    readers = readers_of([1] * count, n_readers, fixed_shards=True, shuffle_seed=seed)
    if left:
        alone = make([1] * count, shuffle_seed=seed)
        taken(alone, left)
        for reader in readers:
            reader.go_on(alone.remaining([alone.state_dict()]))
    first = -(-left // count)
    owners: dict[int, list[int]] = {example: [] for example in range(count)}
    for number, reader in enumerate(readers):
        for place, example in enumerate(taken(reader, 4 * count)):
            if first <= (left + number + place * n_readers) // count < first + 3:
                owners[example].append(number)
    assert {len(each) for each in owners.values()} == {3}
    assert sum(len(set(each)) > 1 for each in owners.values()) <= count % n_readers


def test_a_state_of_readers_without_parts_is_not_gone_on_from_by_one() -> None:
    """It would read the rest of its parts, and nobody the rest of what it has left."""
    plain, parted = (
        [make([1] * 6, reader, 2, fixed_shards=keeps) for reader in range(2)]
        for keeps in (False, True)
    )
    for reader in (*plain, *parted):
        taken(reader, 2)
    states = [saved(reader) for reader in plain]
    assert not parted[0].continues(states, 1)
    with pytest.raises(ValueError, match="or of other parts"):
        parted[0].load_state_dict(states[0])
    with pytest.raises(ValueError, match="or of other parts"):
        plain[0].load_state_dict(saved(parted[0]))
    stream = parted[0].remaining(states)
    assert stream.start == 4
    assert stream.dealings == ()


@pytest.mark.slow
@given(
    count=st.integers(6, 30),
    seed=st.none() | st.integers(0, 9),
    runs=st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4),
    steps=st.integers(1, 4),
)
def test_steps_have_the_same_examples_whoever_reads_them(
    count: int, seed: int | None, runs: list[int], steps: int
) -> None:
    """Steps of twelve examples; no example is dropped."""
    alone = make([1] * count, shuffle_seed=seed)
    whole = taken(alone, 12 * steps * len(runs))
    states: list[dict[str, Any]] = []
    for number, n_readers in enumerate(runs):
        readers = readers_of([1] * count, n_readers, shuffle_seed=seed)
        for reader in readers if states else ():
            reader.go_on(reader.remaining(states))
        streams = [iter(reader) for reader in readers]
        for step in range(steps):
            batch = [
                examples_in(inputs)[0]
                for stream in streams
                for inputs, _ in itertools.islice(stream, 12 // n_readers)
            ]
            first = 12 * (steps * number + step)
            assert sorted(batch) == sorted(whole[first : first + 12])
        states = [saved(reader) for reader in readers]
        assert all(state["left"] == [] for state in states)


def test_what_is_left_by_hand() -> None:
    # Of 0 1 2 | 3 4 5 | 6 7 8, reader 0 has read 0 3 6, reader 1 has read 1, reader 2 has read 2 5
    # and goes back to none of them but 5.
    stream = remaining(ExampleStream(), [ReaderPlace(3), ReaderPlace(1), ReaderPlace(2, [5])])
    assert stream == ExampleStream(9 - 2, (4, 5))
    assert [stream.number(place) for place in range(5)] == [4, 5, 7, 8, 9]
    # Two readers of these: 4 7 9 ... and 5 8 10 ...
    assert remaining(stream, [ReaderPlace(2), ReaderPlace(0)]) == ExampleStream(8, (5,))
    assert remaining(stream, [ReaderPlace(0), ReaderPlace(1)]) == ExampleStream(7, (4,))


# -- loaders ---------------------------------------------------------------------------------------


def build(dp_rank: int, dp_world_size: int, workers: int = 0, **kwargs: Any) -> Any:
    chat = {"sources": [DataSource("sharegpt", str(ASSETS / "tiny_chat"))], "seq_len": 256}
    chat |= {"batch_size": 2, "shuffle_seed": 4, "loading": {"num_workers": workers}}
    return build_loader(dp_rank=dp_rank, dp_world_size=dp_world_size, **{**chat, **kwargs})


def texts(stream: Any, count: int) -> list[tuple[int, ...]]:
    batches = itertools.islice(stream, count)
    return [tuple(example) for inputs, _ in batches for example in inputs["input"].tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(0, 0), (2, 0), (0, 2)])
def test_loaders_go_on_where_others_have_stopped(workers: tuple[int, int]) -> None:
    whole = texts(iter(build(0, 1)), 75)
    assert len(set(whole)) == 150, "an epoch"
    loaders = [build(rank, 2, workers[0]) for rank in range(2)]
    streams = [iter(loader) for loader in loaders]
    read = [example for stream in streams for example in texts(stream, 9)]
    state: dict[str, Any] = {}
    for loader in loaders:
        state |= loader.state_dict()
    after = [build(rank, 3, workers[1], batch_size=1) for rank in range(3)]
    assert after[2].state_to_load(state.keys()).keys() == state.keys()
    for loader in after:
        loader.load_state_dict(state)
    rest = [example for loader in after for example in texts(iter(loader), 38)]
    if workers == (0, 0):
        assert sorted(read) == sorted(whole[:36])
        assert sorted(rest) == sorted(whole[36:]), "150 examples, 36 of them read by two"
    assert sorted(read + rest) == sorted(whole)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_that_keep_their_parts_are_resumed_exactly(workers: int) -> None:
    """In the second epoch. Of 150 examples four readers, two of each rank, share out 148."""
    kwargs = {"fixed_shards": True, "workers": workers}
    loaders = [build(rank, 2, **kwargs) for rank in range(2)]
    streams = [iter(loader) for loader in loaders]
    first = [texts(stream, 45) for stream in streams]
    state: dict[str, Any] = {}
    for loader in loaders:
        state |= loader.state_dict()
    rest = [texts(stream, 30) for stream in streams]
    for rank, wanted in enumerate(rest):
        resumed = build(rank, 2, **kwargs)
        resumed.load_state_dict(state)
        assert texts(iter(resumed), 30) == wanted
        assert len({*first[rank], *wanted}) <= (75 if workers == 0 else 74 + 2)


def test_a_rank_that_is_missing_is_told() -> None:
    state = build(0, 2).state_dict()
    with pytest.raises(ValueError, match=r"has world_size = 2, but not dp_rank_1; .*exclude_from"):
        build(0, 1).load_state_dict(state)


def test_states_of_other_data_are_refused() -> None:
    loaders = [build(rank, 2) for rank in range(2)]
    state = {key: value for loader in loaders for key, value in loader.state_dict().items()}
    with pytest.raises(ValueError, match="has shuffle_seed = 4, this run has 5"):
        build(0, 1, shuffle_seed=5).load_state_dict(state)
    one, other = (make([1] * 6, reader, 2) for reader in range(2))
    one.go_on(ExampleStream(3))
    with pytest.raises(ValueError, match="not the states of all readers of one stream"):
        make([1] * 6).remaining([one.state_dict(), other.state_dict()])
    with pytest.raises(ValueError, match=r"other readers than these 1, or .*; remaining\(\) tells"):
        make([1] * 6).load_state_dict(one.state_dict())


class Spy:
    """What a foreign checkpoint could have run."""

    def __reduce__(self) -> Any:
        return os.system, ("touch spied",)


def test_nothing_in_a_state_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = {"dp_rank_0": pickle.dumps({"dataset_state": Spy()}), "world_size": 1}
    with pytest.raises(ValueError, match=r"names posix\.system; its state must be plain values"):
        build(0, 1).load_state_dict(state)
    assert not Path("spied").exists()


def test_parts_by_hand() -> None:
    # Part 0 has 10 and 12, part 1 has 11 and 13; 14 is nobody's. The readers of part 1 have the
    # places 0, 2 and 4 here, and so 14 too.
    first, order = np.array([10, 11, 12, 13, 14]), np.array([13, 14, 12, 10, 11])
    assert in_parts(order, first, 2, 1).tolist() == [13, 12, 14, 10, 11]
    # Now those of part 0 have.
    assert in_parts(order, first, 2, 4).tolist() == [14, 13, 12, 11, 10]
    assert in_parts(first, first, 2, 0).tolist() == first.tolist()


def test_a_dealing_is_that_of_the_readers_who_begin() -> None:
    """Of 4 5 7 8 9 10 11 | 12 ... reader 0 takes 4 7 9 11 13 and reader 1 takes 5 8 10 12."""
    stream = ExampleStream(7, (4, 5), (ShardAssignment(0, 3, 0),))
    dealt = stream.in_parts(2, n_examples=6)
    assert dealt.dealings == (ShardAssignment(0, 3, 0), ShardAssignment(2, 2, 1))
    assert [dealt.dealing(epoch).n_parts for epoch in range(4)] == [3, 3, 2, 2]
    assert [(number + 1) % 2 for number in (11, 13, 12, 10)] == [0, 0, 1, 1]
    # The same readers go on: nothing is dealt again. Others begin in the same epoch: what these had
    # not begun is.
    assert dealt.in_parts(2, 6) == dealt
    assert dealt.in_parts(3, 6).dealings == (ShardAssignment(0, 3, 0), ShardAssignment(2, 3, 1))
    assert dealt.in_parts(1, 6).dealings == (ShardAssignment(0, 3, 0), ShardAssignment(2, 1, 0))
    assert ExampleStream().in_parts(1, 6).dealings == ()


@pytest.mark.parametrize("seed", [None, 5])
def test_numbers_of_two_epochs_in_turn(seed: int | None) -> None:
    order, stream = EpochOrder(np.arange(20, 26), seed), ExampleStream()
    read = [order.index(stream, number) for number in (0, 6, 12, 1, 7, 13, 2, 8, 14, 3, 9, 15)]
    read += [order.index(stream, number) for number in (4, 5, 10, 11, 16, 17)]
    epochs = [read[e:12:3] + read[12 + 2 * e : 14 + 2 * e] for e in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(20, 26))] * 3
    if seed is not None:
        generators = [np.random.default_rng([seed, epoch]) for epoch in range(3)]
        assert epochs == [g.permutation(np.arange(20, 26)).tolist() for g in generators]
