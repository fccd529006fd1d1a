import os
import signal
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.timelyfreeze.helpers.stages import process_group
from timelyfreeze.planning import STOP_SIGNALS
from torchtitan.freezing.stop_request import StopRequest


@pytest.fixture
def request_to_stop(heeded: None) -> Iterator[StopRequest]:
    with process_group():
        yield StopRequest(timedelta(seconds=20))


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_agreed_on_one_step_later(
    number: signal.Signals, request_to_stop: StopRequest
) -> None:
    with request_to_stop.listening():
        assert request_to_stop.agreed() is None
        os.kill(os.getpid(), number)
        assert request_to_stop.agreed() is None, "the others do not know yet"
        assert request_to_stop.agreed() is number
        assert request_to_stop.settled() is number


def test_the_first_signal_counts_and_handlers_are_put_back(request_to_stop: StopRequest) -> None:
    former = [signal.getsignal(number) for number in STOP_SIGNALS]
    with request_to_stop.listening():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        request_to_stop.agreed()
        assert request_to_stop.settled() is signal.SIGINT
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == former


def test_a_signal_that_nohup_ignores_stays_ignored(request_to_stop: StopRequest) -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with request_to_stop.listening():
            os.kill(os.getpid(), signal.SIGHUP)
            assert request_to_stop.heard == 0
            os.kill(os.getpid(), signal.SIGTERM)
            assert request_to_stop.heard == signal.SIGTERM
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)


def test_without_a_signal_nothing_is_settled(request_to_stop: StopRequest) -> None:
    assert request_to_stop.settled() is None
    for _ in range(3):
        assert request_to_stop.agreed() is None
    assert request_to_stop.settled() is None


def test_its_group_is_given_back_once_nothing_is_on_its_way() -> None:
    with process_group():
        n_groups = len(dist.distributed_c10d._world.pg_map)
        request_to_stop = StopRequest(timedelta(seconds=20))
        request_to_stop.agreed()
        assert len(dist.distributed_c10d._world.pg_map) == n_groups + 1
        request_to_stop.settled()
        request_to_stop.close()
        assert len(dist.distributed_c10d._world.pg_map) == n_groups
