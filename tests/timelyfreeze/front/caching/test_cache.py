"""The cache along the steps, on one rank: when rows are kept, found, dropped and given up."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.timelyfreeze.helpers.cached_run import BATCHES, Run, cuts
from timelyfreeze.front.caching import ActivationStore, EntryFolder, Row
from timelyfreeze.front.caching import folder as folder_module
from timelyfreeze.front.caching.verdict import N_COMPUTED, N_ENTERED


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


def test_a_run_that_goes_on_finds_rows_of_shallower_fronts(tmp_path: Path) -> None:
    first = Run(folder=EntryFolder(tmp_path, 0, 1 << 20))
    for _ in range(2):
        first.step(1)
    first.cache.close()
    later = [[Row(number, "") for number in rows] for rows in ((8, 9, 10, 11), (12, 13, 14, 15))]
    for change, start in ((0.0, (1, 0)), (1.0, None)):
        # As another process, then with other weights.
        again = Run(folder=EntryFolder(tmp_path, 3, 1 << 20))
        again.parameters["layers.0"] += change
        for _ in range(2):
            again.step(2, later)
        assert [entry.start for entry in again.step(2)] == [start, start]
        again.cache.close()


def test_nothing_is_kept_while_nothing_is_frozen(run: Run) -> None:
    assert run.step(None) == [None, None]
    assert run.cache.use().batches == 0


def test_a_step_that_nobody_names_is_computed(run: Run) -> None:
    for _ in range(3):
        run.step(1)
    run.begin(1)
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
    # Those that began behind the front before that was decided have saved as much.
    assert use.saved_ms == pytest.approx(10.0 * use.entered)
    assert (use.memory_bytes > 0) is pays
    # Another depth is looked at again.
    for _ in range(2):
        run.step(2)
    assert cuts(run.step(2)) == [True, True]
    run.cache.close()


def numbers(batches: Sequence[Sequence[Row]]) -> list[list[int]]:
    return [[row.number for row in batch] for batch in batches]


def settle(store: ActivationStore) -> None:
    for read in list(store._folder._reads.values()):
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
    assert on_disk.store._folder._reads == {}


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
    assert sorted(number for _, number in on_disk.store._folder._reads) == [12, 13, 14, 15]
    (second,) = on_disk.step(2, later[1:], numbers(BATCHES))
    assert second.start == (1, 0)
    assert on_disk.cache.use().read_ahead == 4
    assert sorted(number for _, number in on_disk.store._folder._reads) == list(range(8))


def test_only_the_rank_that_reads_asks_which_rows_come(tmp_path: Path) -> None:
    run = Run(folder=EntryFolder(tmp_path, 0, 1 << 20))
    run.cache.stages = frozenset([0])
    run.cache.exchange.all_gather = lambda value: (
        [value] if isinstance(value, tuple) else [[[True]] * len(value)]
    )
    for _ in range(3):
        run.step(1)
    assert run.cache.use().entered == 2
    assert run.n_asked is None
    run.cache.close()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that is pushed on by 100 s for each row that the training reads itself."""
    now, read = [0.0], folder_module.read_entry
    monkeypatch.setattr("timelyfreeze.front.caching.cache.time.perf_counter", lambda: now[0])

    def slow(folder: Path, number: int) -> object:
        now[0] += 100.0 * (threading.current_thread() is threading.main_thread())
        return read(folder, number)

    monkeypatch.setattr(folder_module, "read_entry", slow)
    return now


def test_it_is_decided_by_what_the_training_waits_for(on_disk: Run, now: list[float]) -> None:
    """Nobody could read ahead the rows of the first step that reads, so it does not count."""
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
    on_disk: Run, now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_disk.store._folder, "want", lambda places: None)
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
