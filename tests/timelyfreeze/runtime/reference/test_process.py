"""A reference in a process of its own: it answers, it is never waited for, and it may die."""

import copy
import logging
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend

from tests.timelyfreeze.runtime.reference.test_model import batch, blocks, loaded
from timelyfreeze.policies import Difference, ReferenceSettings
from timelyfreeze.runtime.reference.process import ReferenceProcess, answers_to

LONGEST_S = 120.0
SETTINGS = ReferenceSettings(queue_length=2)


@pytest.fixture
def reference() -> Iterator[ReferenceProcess]:
    made = ReferenceProcess(SETTINGS)
    yield made
    made.close()


def wait_for(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def answers(reference: ReferenceProcess, n: int) -> tuple[list[Difference], int]:
    """Wait until so many comparisons were answered or lost."""
    found: list[Difference] = []
    n_lost = 0

    def all_there() -> bool:
        nonlocal n_lost
        some, lost = reference.take()
        found.extend(some)
        n_lost += lost
        return len(found) + n_lost >= n

    wait_for(all_there)
    return found, n_lost


@pytest.mark.slow
def test_a_stopped_process_holds_up_nothing_and_a_killed_one_is_started_again(
    reference: ReferenceProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """Input and output travel together, so two of Egeria's three queues do."""
    ours = blocks()
    reference.load(blocks(1))
    captured = batch(ours)
    assert reference.offer(captured)
    wanted = loaded(blocks(1), SETTINGS).difference(captured)
    assert answers(reference, 1) == ([wanted], 0)

    # It stands still: two wait, the rest is dropped, and every call returns with nothing found.
    assert reference.pid is not None
    os.kill(reference.pid, signal.SIGSTOP)
    offered = [reference.offer(replace(captured, step=step)) for step in (1, 2, 3, 4)]
    assert offered == [True, True, False, False]
    assert reference.take() == ([], 0)
    reference.load(ours)  # for what is offered from now on
    os.kill(reference.pid, signal.SIGCONT)
    found, n_lost = answers(reference, 2)
    assert ([one.step for one in found], n_lost) == ([1, 2], 0)
    assert {one.value for one in found} == {wanted.value}

    # It dies with one in its hands.
    before = reference.pid
    os.kill(before, signal.SIGSTOP)
    assert reference.offer(captured)
    os.kill(before, signal.SIGKILL)
    with caplog.at_level(logging.WARNING):
        assert answers(reference, 1) == ([], 1)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == (
        "The reference process ended with exit status -9; it is started again, and the 1 "
        "evaluations that it had are left out"
    )
    assert reference.pid not in (None, before)
    assert reference.offer(captured)
    ((again,), _) = answers(reference, 1)
    # It has the blocks that were loaded last.
    assert again == loaded(copy.deepcopy(ours), SETTINGS).difference(captured)


def test_a_process_that_dies_again_and_again_is_given_up(
    reference: ReferenceProcess, caplog: pytest.LogCaptureFixture
) -> None:
    reference.load(blocks())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            pid = reference.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda pid=pid: reference.take() and reference.pid != pid)
    assert reference.pid is None
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "ERROR"]
    assert "3 times without an answer" in caplog.records[-1].getMessage()
    reference.load(blocks())
    assert not reference.offer(batch(blocks()))
    assert reference.take() == ([], 0)


def test_a_closed_process_has_ended(reference: ReferenceProcess) -> None:
    reference.load(blocks())
    pid = reference.pid
    assert pid is not None
    reference.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not reference.offer(batch(blocks()))


def served(*messages: object) -> list[str]:
    """What the process would say to these messages, without a process."""
    said = filter(None, answers_to([pickle.dumps(message) for message in messages]))
    return [answer.text if hasattr(answer, "text") else f"step {answer.step}" for answer in said]


def test_what_fails_is_told_and_the_next_is_answered() -> None:
    good = batch(blocks())
    wrong = replace(good, args=(torch.ones(2, 7), torch.ones(1)))
    said = served(({}, SETTINGS, pickle.dumps(blocks())), wrong, good)
    assert said[0].startswith("RuntimeError: ")
    assert said[1:] == ["step 7"]
    assert served(good) == ["ValueError: it has no blocks"]
    assert served(({}, SETTINGS, b"no pickle"), good)[1:] == ["ValueError: it has no blocks"]


def test_blocks_may_have_chosen_kernels_of_attention() -> None:
    layers = nn.ModuleList([nn.Identity()])
    layers.backends = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]  # type: ignore[assignment]
    again = pickle.loads(pickle.dumps(layers))
    assert again.backends == [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
