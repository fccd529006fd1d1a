"""The cache along the steps, on one rank: when rows are kept, found, dropped and given up."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from timelyfreeze.control.caching import ActivationStore, EntryFolder, FrontCache, Row
from timelyfreeze.control.caching.verdict import N_COMPUTED, N_ENTERED
from timelyfreeze.policies import build_layout
from timelyfreeze.runtime import BatchEntry
from timelyfreeze.schedule import ActionKind, build_dag, gpipe_order

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
        self.cache = FrontCache(self.store, LAYOUT, self.parameters, [0, 1], DAG, exchange, "model")
        self.front_ms = front_ms
        self.read_ms = read_ms

    def _drain(self) -> None:
        if self.read_ms is not None:
            self.cache._kept.times.read_ms = [self.read_ms] * N_ENTERED

    def step(
        self,
        depth: int | None,
        batches: Sequence[Sequence[Row]] = BATCHES,
        upcoming: Sequence[Sequence[int]] = (),
    ) -> list[BatchEntry | None]:
        cache = self.cache
        cache.begin_step(None if depth is None else frozen(depth))
        cache.name_batches(batches)
        self.n_asked: int | None = None
        cache.read_ahead(lambda n: self._upcoming(n, upcoming))
        entries = [self.batch(number, batch) for number, batch in enumerate(batches)]
        cache.end_step(self._drain)
        self.store.flush()
        return entries

    def _upcoming(self, n: int, batches: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        self.n_asked = n
        return batches

    def batch(self, number: int, batch: Sequence[Row]) -> BatchEntry | None:
        entry = self.cache.entry(number)
        is_cut = entry is not None and entry.start is not None
        if entry is not None and entry.tap is not None:
            rows = torch.tensor([float(row.number) for row in batch])
            for microbatch, part in enumerate(rows.reshape(2, -1, 1)):
                entry.tap(microbatch, part)
        front_ms = {ActionKind.FORWARD: 0.0 if is_cut else self.front_ms}
        self.cache.add_times(
            {a: 10.0 if a.stage else front_ms.get(a.kind, 0.0) for a in DAG.actions}
        )
        return entry


def cuts(entries: Sequence[BatchEntry | None]) -> list[bool]:
    return [entry is not None and entry.start is not None for entry in entries]


@pytest.fixture
def run() -> Iterator[Run]:
    run = Run()
    yield run
    run.cache.close()


def test_rows_are_kept_in_one_epoch_and_found_in_the_next(run: Run) -> None:
    assert cuts(run.step(1)) == [False, False]
    # The first batches at a depth are computed, whatever there is.
    assert cuts(run.step(1)) == [False, False]
    assert N_COMPUTED == 3
    shuffled = [[Row(number, "") for number in (7, 0, 5, 2)]]
    (entry,) = run.step(1, shuffled)
    assert entry is not None
    assert entry.start == (1, 0)
    assert [part.tolist() for part in entry.inputs.values()] == [[[7.0], [0.0]], [[5.0], [2.0]]]


def test_a_batch_with_one_missing_row_is_computed_and_the_row_kept(run: Run) -> None:
    run.step(1)
    run.step(1)
    batch = [[Row(number, "") for number in (0, 1, 2, 99)]]
    assert cuts(run.step(1, batch)) == [False]
    assert cuts(run.step(1, batch)) == [True]


@pytest.mark.parametrize("between", [1, None])
def test_unfreezing_drops_everything(run: Run, between: int | None) -> None:
    for _ in range(3):
        run.step(2)
    assert cuts(run.step(2)) == [True, True]
    run.step(between)
    for parameter in run.parameters.values():
        parameter += 1.0  # they have learned
    assert [cuts(run.step(2)) for _ in range(3)] == [[False, False], [False, False], [True, True]]


def test_a_front_that_grows_goes_on_from_what_was_kept_of_the_shallower_one(run: Run) -> None:
    """No row passes a frozen block twice, but for the batches that are computed to be timed."""
    later = [[Row(number, "") for number in rows] for rows in ((8, 9, 10, 11), (12, 13, 14, 15))]
    for _ in range(2):
        run.step(1, [*BATCHES, *later])
    assert cuts(run.step(2)) == [False, False]
    assert cuts(run.step(2)) == [False, False]
    first = run.step(2, later)
    assert [entry.start for entry in first] == [(1, 0), (1, 0)]
    assert [entry.tapped for entry in first] == [(1, 1), (1, 1)]
    assert first[0].inputs[1].tolist() == [[10.0], [11.0]]
    second = run.step(2, later)
    assert [entry.start for entry in second] == [(1, 1), (1, 1)]
    # At both depths: there is room.
    assert run.store.memory_used == 2 * 16 * 4


def test_a_batch_begins_behind_the_deepest_front_that_has_all_of_its_rows(run: Run) -> None:
    """Against sets of rows, depth by depth, for random batches of 4 of 16 rows."""
    draws = np.random.default_rng(0)
    starts = {0: None, 1: (1, 0), 2: (1, 1), 3: (1, 2)}
    held: dict[int, set[int]] = {}
    seen = set()
    for depth, n_steps in ((1, 30), (2, 8), (3, 30)):
        held[depth] = set()
        n_computed = 0
        for _ in range(n_steps):
            rows = draws.choice(16, 4, replace=False).tolist()
            deeper = [d for d in sorted(held, reverse=True) if held[d] >= set(rows)]
            begins = deeper[0] if deeper and n_computed >= N_COMPUTED else 0
            (entry,) = run.step(depth, [[Row(row, "") for row in rows]])
            assert entry is not None
            assert entry.start == starts[begins]
            n_computed += begins == 0
            held[depth].update(rows if begins != depth else ())
            seen.add((depth, begins))
        run.cache._kept.is_decided = True  # whether it pays is not asked here
    assert seen >= {(1, 0), (1, 1), (2, 1), (2, 2), (3, 1), (3, 2)}


def test_nothing_is_kept_while_nothing_is_frozen(run: Run) -> None:
    assert run.step(None) == [None, None]
    assert run.cache.use().batches == 0


def test_a_step_that_nobody_names_is_computed(run: Run) -> None:
    for _ in range(3):
        run.step(1)
    run.cache.begin_step(frozen(1))
    assert run.cache.entry(0) is None


@pytest.mark.parametrize(("read_ms", "pays"), [(9.0, True), (11.0, False)])
def test_reading_goes_on_only_where_it_is_faster(read_ms: float, pays: bool) -> None:
    """Of two forwards of 10 ms the second runs beside the stage behind, which is as slow."""
    run = Run(front_ms=10.0, read_ms=read_ms)
    for _ in range(2 + N_ENTERED // 2):
        run.step(1)
    assert cuts(run.step(1)) == [pays, pays]
    use = run.cache.use()
    assert use.entered == N_ENTERED + 2 * pays
    assert (use.saved_ms or 0.0) > 0.0
    assert (use.memory_bytes > 0) is pays
    # Another depth is looked at anew.
    for _ in range(2):
        run.step(2)
    assert cuts(run.step(2)) == [True, True]
    run.cache.close()


def numbers(batches: Sequence[Sequence[Row]]) -> list[list[int]]:
    return [[row.number for row in batch] for batch in batches]


def settle(store: ActivationStore) -> None:
    for read in list(store._ahead._reads.values()):
        read.exception(60)


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Run]:
    run = Run(folder=EntryFolder(tmp_path, 0, 1 << 20))
    yield run
    run.cache.close()


def test_rows_of_the_next_step_are_read_while_this_one_runs(on_disk: Run) -> None:
    for _ in range(2):
        on_disk.step(1, upcoming=numbers(BATCHES))
        assert on_disk.n_asked is None  # nothing is read yet
    for step in range(4):
        assert cuts(on_disk.step(1, upcoming=numbers(BATCHES))) == [True, True]
        assert on_disk.n_asked == 5
        assert on_disk.cache.use().read_ahead == 8 * step
        settle(on_disk.store)
    entries = on_disk.step(1)  # which nobody follows
    assert entries[1].inputs[1].tolist() == [[6.0], [7.0]]
    assert on_disk.cache.use().read_ahead == 8 * 4
    assert on_disk.store._ahead._reads == {}


def test_a_step_of_many_batches_looks_as_far_as_the_next(on_disk: Run) -> None:
    for _ in range(2):
        on_disk.step(1, [*BATCHES] * 3)
    assert on_disk.n_asked == 6


def test_rows_of_an_older_front_are_read_ahead_too(on_disk: Run) -> None:
    """Batches of which all rows are there at the new depth are not, until one has been read."""
    later = [[Row(number, "") for number in rows] for rows in ((8, 9, 10, 11), (12, 13, 14, 15))]
    for _ in range(2):
        on_disk.step(1, [*BATCHES, *later])
    for _ in range(2):
        on_disk.step(2)
    (first,) = on_disk.step(2, later[:1], numbers(later[1:]))
    assert first.start == (1, 0)
    settle(on_disk.store)
    assert sorted(number for _, number in on_disk.store._ahead._reads) == [12, 13, 14, 15]
    (second,) = on_disk.step(2, later[1:], numbers(BATCHES))
    assert second.start == (1, 0)
    assert on_disk.cache.use().read_ahead == 4
    assert sorted(number for _, number in on_disk.store._ahead._reads) == list(range(8))


def test_only_the_rank_that_reads_asks_which_rows_come(tmp_path: Path) -> None:
    run = Run(folder=EntryFolder(tmp_path, 0, 1 << 20))
    run.cache._stages = frozenset([0])
    run.cache._exchange.all_gather = lambda value: (
        [value] if isinstance(value, dict) else [[[True]] * len(value)]
    )
    for _ in range(3):
        run.step(1)
    assert run.cache.use().entered == 2
    assert run.n_asked is None
    run.cache.close()


def test_it_is_decided_by_what_the_training_waits_for(
    on_disk: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could read ahead the rows of the first step that reads, so it does not count.

    A row that the training reads itself takes 100 s of a clock that is pushed on.
    """
    now = [0.0]
    monkeypatch.setattr("timelyfreeze.control.caching.cache.time.perf_counter", lambda: now[0])
    read = EntryFolder.read

    def slow(folder: EntryFolder, front: str, number: int) -> object:
        now[0] += 100.0 * (threading.current_thread() is threading.main_thread())
        return read(folder, front, number)

    monkeypatch.setattr(EntryFolder, "read", slow)
    waited = []
    for _ in range(5):
        on_disk.step(1, upcoming=numbers(BATCHES))
        settle(on_disk.store)
        waited.append(now[0])
    assert waited == [0.0, 0.0, 800.0, 800.0, 800.0]
    kept = on_disk.cache._kept
    assert kept.times.read_ms == [0.0] * 4
    assert kept.is_decided
    assert kept.verdict.pays
    assert kept.verdict.read_ms == 0.0


def test_a_disk_that_is_too_slow_to_be_read_ahead_does_not_pay(
    on_disk: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_disk.store._ahead, "want", lambda places: None)
    now = [0.0]
    monkeypatch.setattr("timelyfreeze.control.caching.cache.time.perf_counter", lambda: now[0])
    read = EntryFolder.read

    def slow(folder: EntryFolder, front: str, number: int) -> object:
        now[0] += 100.0
        return read(folder, front, number)

    monkeypatch.setattr(EntryFolder, "read", slow)
    for _ in range(4):
        on_disk.step(1, upcoming=numbers(BATCHES))
    verdict = on_disk.cache._kept.verdict
    assert (verdict.read_ms, verdict.pays) == (400e3, False)


def test_it_is_decided_in_a_step_whose_reading_was_timed(run: Run) -> None:
    """Four batches began behind the front in one step, and in the next there is none."""
    run.step(1, [*BATCHES, *BATCHES])
    run.step(1, [*BATCHES, *BATCHES])
    unknown = [[Row(number, "") for number in (0, 1, 2, 99)]]
    run.step(1, unknown)
    assert not run.cache._kept.is_decided
    run.step(1)
    assert run.cache._kept.is_decided
    assert run.cache._kept.verdict is not None


def test_what_cannot_be_read_after_all_is_computed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        run.step(1)
    monkeypatch.setattr(
        run.store, "read", lambda front, row: None if row.number == 5 else torch.ones(1)
    )
    assert cuts(run.step(1)) == [True, False]


class Talk:
    """Ranks that step together in one thread: each says its part, then all hear everyone's."""

    def __init__(self, *others: object) -> None:
        self.rank, self.size = 0, 1 + len(others)
        self.gathered: list[object] = []
        self._others = list(others)

    def all_gather(self, value: object) -> list[object]:
        self.gathered.append(value)
        if isinstance(value, dict):  # digests
            return [value, *[dict.fromkeys(("layers.0", "layers.1"), "1")] * (self.size - 1)]
        return [value, *self._others]


def front_rank(*others: object) -> tuple[FrontCache, Talk]:
    """A rank that holds the first stage and has seen the batches that are computed in any case."""
    talk = Talk(*others)
    parameters = {name: torch.zeros(1) for name in ("embedding", "layers.0")}
    store = ActivationStore(1 << 20, None)
    cache = FrontCache(store, LAYOUT, parameters, [0], DAG, talk, "model")  # type: ignore[arg-type]
    cache.begin_step(frozen(1))
    for number in range(N_COMPUTED):
        cache.entry(number)
    return cache, talk


def test_all_ranks_take_the_word_of_the_one_that_reads() -> None:
    """A rank in front of the live stages has no rows, and learns that batches pass it by."""
    cache, talk = front_rank([[True], [False]])
    cache.name_batches(BATCHES)
    assert talk.gathered[-1] == [[None], [None]]
    entries = [cache.entry(number) for number in range(2)]
    assert cuts(entries) == [True, False]
    assert entries[0] is not None
    assert entries[0].passes_by(0)
    assert entries[0].begins_at(1)
    assert len(entries[0].inputs) == 0
    cache.close()


@pytest.mark.parametrize(
    ("first", "second", "begins"),
    [(True, True, True), (True, False, False), (False, True, False), (False, False, False)],
)
def test_a_batch_begins_behind_the_front_only_where_all_replicas_have_its_rows(
    first: bool, second: bool, begins: bool
) -> None:
    """Of two pipelines of two ranks; else one would gather parameters that the other does not."""
    cache, _ = front_rank([[first]], [[None]], [[second]])
    cache.name_batches(BATCHES[:1])
    assert cuts([cache.entry(0)]) == [begins]
    cache.close()


def beside(run: Run, told: list[bool | None]) -> None:
    """Let there be another replica, which has so much of a batch, front by front, and reads it."""

    def says(value: object) -> object:
        if isinstance(value, list):
            return [told if len(value[0]) == len(told) else [True]]
        return value

    run.cache._exchange = SimpleNamespace(
        all_gather=lambda value: [value, says(value)],
        rank=0,
        size=2,
    )


@pytest.mark.parametrize("other_has", [True, False])
def test_a_replica_computes_rows_that_it_has_where_another_has_not(
    run: Run, other_has: bool
) -> None:
    for _ in range(3):
        run.step(1)
    used = run.store.memory_used
    beside(run, [other_has])
    assert cuts(run.step(1, BATCHES[:1])) == [other_has]
    assert run.store.memory_used == used, "kept twice"


@pytest.mark.parametrize(("told", "start"), [([False, False], None), ([False, True], (1, 0))])
def test_replicas_go_on_from_a_shallower_front_only_together(
    run: Run, told: list[bool | None], start: tuple[int, int] | None
) -> None:
    later = [[Row(number, "") for number in (8, 9, 10, 11)]]
    for _ in range(2):
        run.step(1, [*BATCHES, *later])
    for _ in range(2):
        run.step(2)  # computed in any case
    beside(run, told)
    (entry,) = run.step(2, later)
    assert entry is not None
    assert entry.start == start
    assert entry.tapped == (1, 1), "kept at the new depth in both cases"
    # Each of the 12 rows is kept at both depths.
    assert run.store.memory_used == 2 * 12 * 4


def test_a_batch_that_another_replica_cannot_read_after_all_is_computed(run: Run) -> None:
    for _ in range(3):
        run.step(1)
    answers = iter([[True], [False]])
    run.cache._exchange = SimpleNamespace(
        all_gather=lambda value: [value, [next(answers)]], rank=0, size=2
    )
    assert cuts(run.step(1, BATCHES[:1])) == [False]
