"""Messages that are sent there and back on a clock that is moved by hand."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from timelyfreeze.runtime import exchange as transfers
from timelyfreeze.runtime.exchange import measure_transfers, pipeline_links
from timelyfreeze.schedule.order import parse_order

LINE = parse_order(["0F0 0B0", "1F0 1B0", "2F0 2B0"])


class Exchange:
    """All ranks' message sizes, as one of them sees them; counts how often ranks meet."""

    def __init__(self, everyone: list[int]) -> None:
        self.everyone = everyone
        self.n_meetings = 0

    def all_gather(self, value: Any) -> list[Any]:
        self.n_meetings += 1
        return self.everyone if value is not None else [None] * len(self.everyone)


class Wire:
    """Stands in for ``torch.distributed`` and the clock; every receive takes its time."""

    def __init__(self, rank: int, receive_ms: Iterator[float]) -> None:
        self.rank, self.receive_ms = rank, receive_ms
        self.now_ms = 0.0
        self.sent: list[tuple[str, int, int]] = []

    def get_rank(self, group: Any) -> int:
        assert group == "the pipeline's"
        return self.rank

    def send(self, message: torch.Tensor, *, group: Any, group_dst: int) -> None:
        assert group == "the pipeline's"
        self.sent.append(("send", group_dst, message.nbytes))

    def recv(self, message: torch.Tensor, *, group: Any, group_src: int) -> None:
        assert group == "the pipeline's"
        self.sent.append(("recv", group_src, message.nbytes))
        self.now_ms += next(self.receive_ms)


def stage(n_bytes: int) -> Any:
    return SimpleNamespace(message_bytes=n_bytes, group="the pipeline's")


def measure(
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    receive_ms: list[float],
    sizes: list[int],
    order: Any = LINE,
) -> tuple[dict[tuple[int, int], float], Wire, Exchange]:
    wire, exchange = Wire(rank, iter(receive_ms)), Exchange(sizes)
    monkeypatch.setattr(transfers, "dist", wire)
    monkeypatch.setattr(transfers, "_now_ms", lambda device: wire.now_ms)
    stages = [stage(0), stage(sizes[rank])]
    found = measure_transfers(stages, order, exchange, torch.device("cpu"))  # type: ignore[arg-type]
    return found, wire, exchange


def test_links_are_those_between_neighbouring_stages() -> None:
    assert pipeline_links(LINE) == [(0, 1), (1, 2)]
    # Dealt out in turn, the last rank sends to the first; folded, stages of a rank meet.
    turn = parse_order(["0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0"])
    assert pipeline_links(turn) == [(0, 1)]
    three = ["0F0 3F0 3B0 0B0", "1F0 4F0 4B0 1B0", "2F0 5F0 5B0 2B0"]
    assert pipeline_links(parse_order(three)) == [(0, 1), (0, 2), (1, 2)]
    folded = ["0F0 5F0 5B0 0B0", "1F0 4F0 4B0 1B0", "2F0 3F0 3B0 2B0"]
    assert pipeline_links(parse_order(folded)) == [(0, 1), (1, 2)]
    assert pipeline_links(parse_order(["0F0 1F0 1B0 0B0"])) == []


def test_half_of_the_median_way_there_and_back_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    # Three to warm up, then 15, of which a few were held up.
    there_and_back = [90.0, 80.0, 70.0, *[4.0] * 8, *[50.0] * 7]
    found, wire, exchange = measure(monkeypatch, 0, there_and_back, [512, 2048, 0])
    assert found == {(0, 1): 2.0, (1, 0): 2.0}
    # The largest message of any rank, and nothing over the link of the others.
    assert wire.sent == [("send", 1, 2048), ("recv", 1, 2048)] * 18
    assert exchange.n_meetings == 3  # sizes, then once after each of two links


def test_a_rank_in_the_middle_answers_below_and_asks_above(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered = [1000.0] * 18
    found, wire, _ = measure(monkeypatch, 1, [*answered, *[3.0] * 18], [64, 64, 0])
    assert found == {(1, 2): 1.5, (2, 1): 1.5}
    assert wire.sent[:2] == [("recv", 0, 64), ("send", 0, 64)]
    assert wire.sent[-2:] == [("send", 2, 64), ("recv", 2, 64)]


def test_without_messages_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = parse_order(["0F0 1F0 1B0 0B0"])
    for sizes, order in (([0, 0, 0], LINE), ([64], alone)):
        found, wire, _ = measure(monkeypatch, 0, [], sizes, order)
        assert found == {}
        assert wire.sent == []
