"""A batch that was looked at is still to come, in what is read and in what is saved."""

from typing import Any

import pytest
import torch

from tests.torchtitan.data.test_loader import build
from torchtitan.data.loader import Lookahead
from torchtitan.data.sources import ExampleSplit


def rows(batch: Any) -> list[int]:
    return batch[0]["rows"].tolist()


def rest(state: dict[str, Any], **kwargs: Any) -> list[list[int]]:
    """The next three batches of a loader that goes on from ``state``."""
    loader = build(**kwargs)
    loader.load_state_dict(state)
    batches = iter(loader)
    return [rows(next(batches)) for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_looked_at_is_not_lost_and_comes_once(workers: int) -> None:
    plain = iter(build(num_workers=workers, shuffle_seed=3))
    expected = [rows(next(plain)) for _ in range(6)]
    lookahead = Lookahead(build(num_workers=workers, shuffle_seed=3))
    batches = iter(lookahead)
    seen = [rows(next(batches))]
    for _ in range(2):
        looked_at = lookahead.peek()
        assert lookahead.peek() is looked_at
        # A checkpoint that is saved now does not count it.
        state = lookahead.state_dict()
        resumed = rest(state, num_workers=workers, shuffle_seed=3)
        assert resumed == expected[len(seen) : len(seen) + 3]
        batch = next(batches)
        assert batch is looked_at
        seen.append(rows(batch))
        assert (
            rest(lookahead.state_dict(), num_workers=workers, shuffle_seed=3)[0]
            == (expected[len(seen)])
        )
    assert seen == expected[:3]


def test_at_the_end_there_is_nothing_to_look_at() -> None:
    some = {"infinite": False, "split": ExampleSplit(0.1, held_out=True)}
    n_batches = len(list(build(**some)))
    assert n_batches > 2
    lookahead = Lookahead(build(**some))
    batches = iter(lookahead)
    for _ in range(n_batches):
        assert lookahead.peek() is not None
        next(batches)
    assert lookahead.peek() is None
    with pytest.raises(StopIteration):
        next(batches)


def test_it_loads_what_the_loader_saves() -> None:
    loader = build(shuffle_seed=3)
    batches = iter(loader)
    next(batches)
    lookahead = Lookahead(build(shuffle_seed=3))
    keys = loader.state_dict().keys()
    assert lookahead.state_to_load(keys).keys() == loader.state_to_load(keys).keys()
    lookahead.load_state_dict(loader.state_dict())
    found, expected = next(iter(lookahead)), next(batches)
    assert torch.equal(found[0]["input"], expected[0]["input"])
