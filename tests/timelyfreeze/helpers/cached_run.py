"""A rank that keeps what a frozen front puts out, step by step."""

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch

from timelyfreeze.front.caching import ActivationStore, EntryFolder, FrontCache, Row
from timelyfreeze.front.caching.verdict import N_ENTERED
from timelyfreeze.policies import build_layout
from timelyfreeze.runtime import BatchEntry, ObservedBatch
from timelyfreeze.schedule import ActionKind, build_dag, gpipe_order
from timelyfreeze.settings import Phase, Step
from timelyfreeze.timing import BatchRecord

LAYOUT = build_layout(
    {0: [("embedding", 1), ("layers.0", 1)], 1: [("layers.1", 1), ("layers.2", 1), ("head", 1)]}
)
DAG = build_dag(gpipe_order(2, 2))
BATCHES = [[Row(number, "") for number in rows] for rows in ((0, 1, 2, 3), (4, 5, 6, 7))]


def frozen(depth: int) -> np.ndarray:
    return LAYOUT.prefix(depth)


class Run:
    """A rank that holds both stages; what the front puts out for row n is n."""

    def __init__(
        self,
        front_ms: float = 10.0,
        read_ms: float | None = None,
        folder: EntryFolder | None = None,
    ) -> None:
        self.parameters = {name: torch.zeros(1) for name in LAYOUT.names}
        self.store = ActivationStore(0 if folder else 1 << 20, folder)
        exchange = SimpleNamespace(all_gather=lambda value: [value], rank=0, size=1)
        self.cache = FrontCache(
            self.store,
            LAYOUT,
            self.parameters,
            [0, 1],
            DAG,
            exchange,
            "model",
            lambda: frozen(self.depth),
        )
        self.front_ms = front_ms
        self.read_ms = read_ms

    def _drain(self) -> None:
        if self.read_ms is not None:
            self.cache._kept.times.read_ms = [self.read_ms] * N_ENTERED

    def begin(self, depth: int | None) -> Step:
        """Begin a step with so many frozen blocks; None for one that freezes nothing."""
        self.depth = depth or 0
        step = Step(1, Phase.WARMUP if depth is None else Phase.STABLE)
        self.cache.begin_step(step)
        return step

    def step(
        self,
        depth: int | None,
        batches: Sequence[Sequence[Row]] = BATCHES,
        upcoming: Sequence[Sequence[int]] = (),
    ) -> list[BatchEntry | None]:
        cache = self.cache
        step = self.begin(depth)
        cache.name_batches(batches)
        self.n_asked: int | None = None
        cache.read_ahead(lambda n: self._upcoming(n, upcoming))
        entries = [self.batch(number, batch) for number, batch in enumerate(batches)]
        if cache.needs_times(step):
            self._drain()
        cache.end_step(step)
        self.store.flush()
        return entries

    def _upcoming(self, n: int, batches: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        self.n_asked = n
        return batches

    def batch(self, number: int, batch: Sequence[Row]) -> BatchEntry | None:
        entry = self.cache.entry(number)
        is_cut = entry is not None and entry.start is not None
        if entry is not None and entry.tapped is not None:
            rows = torch.tensor([float(row.number) for row in batch])
            for microbatch, part in enumerate(rows.reshape(2, -1, 1)):
                entry.tap(microbatch, part)
        front_ms = {ActionKind.FORWARD: 0.0 if is_cut else self.front_ms}
        times_ms = {a: 10.0 if a.stage else front_ms.get(a.kind, 0.0) for a in DAG.actions}
        self.cache.read(ObservedBatch(1, Phase.STABLE, False, BatchRecord(times_ms, 0.0, {})))
        return entry


def cuts(entries: Sequence[BatchEntry | None]) -> list[bool]:
    return [entry is not None and entry.start is not None for entry in entries]
