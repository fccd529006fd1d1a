"""How many ranks compute at once, and what is said of it before a run."""

import logging

import pytest
import torch

from timelyfreeze.control import build, processors_of


@pytest.mark.parametrize(
    ("ranks", "cores", "threads", "expected", "says"),
    [
        (2, 3.0, 1, None, ""),
        (2, 2.0, 1, None, "2 ranks compute on all cores and leave none to messages"),
        (2, 4.0, 2, None, "2 ranks compute on all cores and leave none to messages"),
        (4, 2.0, 1, 2.0, "4 ranks share 2 cores"),
        (1, 1.0, 1, None, ""),
    ],
)
def test_cores_of_ranks_are_told(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ranks: int,
    cores: float,
    threads: int,
    expected: float | None,
    says: str,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(build, "usable_cores", lambda: cores)
    monkeypatch.setattr("timelyfreeze.timing.processors.usable_cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with caplog.at_level(logging.INFO):
        assert processors_of(torch.device("cpu"), ranks) == expected
        assert processors_of(torch.device("cuda"), ranks) is None
    assert says in caplog.text
    assert bool(says) == bool(caplog.text)
