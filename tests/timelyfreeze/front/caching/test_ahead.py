"""Reading ahead: by a thread that nobody waits for, within its room, and wrong for nobody.

The disk is a folder whose reads stand still until the test lets them go on, so no test depends on
how fast anything is.
"""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from timelyfreeze.front.caching import ActivationStore, EntryFolder, Row
from timelyfreeze.front.caching import folder as folder_module
from timelyfreeze.front.caching.folder import Entry

LIMIT_S = 60.0
N_ROWS = 12


def row(number: int) -> Row:
    return Row(number, f"tokens {number}")


class Disk:
    """Reads of files that can be seen and held up.

    Attributes:
        reads: (row, whether the training read it itself), in the order in which reads began.
        go_on: By row, what the reader's thread waits for before it reads; nothing if not there.
        began: Set when the reader's thread has begun to read a row of ``go_on``.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: list[tuple[int, bool]] = []
        self.go_on: dict[int, threading.Event] = {}
        self.began = threading.Event()
        self._training = threading.current_thread()
        self._read = folder_module.read_entry
        monkeypatch.setattr(folder_module, "read_entry", self.read_entry)

    def read_entry(self, folder: Path, number: int) -> Entry:
        is_training = threading.current_thread() is self._training
        self.reads.append((number, is_training))
        if number in self.go_on and not is_training:
            self.began.set()
            assert self.go_on[number].wait(LIMIT_S)
        return self._read(folder, number)

    def stop_at(self, number: int) -> threading.Event:
        return self.go_on.setdefault(number, threading.Event())


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def store(tmp_path: Path, disk: Disk) -> Iterator[ActivationStore]:
    """All rows are on the disk; what the front puts out for row n is n."""
    store = ActivationStore(0, EntryFolder(tmp_path, 0, 1 << 20))
    store.begin("front")
    keep(store)
    yield store
    for event in disk.go_on.values():
        event.set()
    store.close()


def keep(store: ActivationStore) -> None:
    for number in range(N_ROWS):
        store.offer([row(number)], torch.full((1, 8), float(number)))
    store.flush()


def settle(store: ActivationStore) -> None:
    """Wait until everything that is wanted was read."""
    for read in list(store._folder._reads.values()):
        read.exception(LIMIT_S)


def value(store: ActivationStore, number: int, front: str = "front") -> float | None:
    read = store.read(front, row(number))
    return None if read is None else read.unique().item()


def test_rows_of_coming_batches_are_read_once_and_by_the_thread(
    store: ActivationStore, disk: Disk
) -> None:
    store.read_ahead(["front"], [[3, 1], [7, 5]])
    settle(store)
    assert disk.reads == [(3, False), (1, False), (7, False), (5, False)]
    store.read_ahead(["front"], [[3, 1], [7, 5], [0, 2]])
    settle(store)
    assert disk.reads[4:] == [(0, False), (2, False)]
    assert [value(store, number) for number in (3, 1, 7, 5, 0, 2)] == [3, 1, 7, 5, 0, 2]
    assert store.n_ahead == len(disk.reads) == 6
    # They are not there twice.
    assert (value(store, 3), disk.reads[6:], store.n_ahead) == (3, [(3, True)], 6)


def test_a_slow_disk_holds_nobody_up(store: ActivationStore, disk: Disk) -> None:
    """Neither the row that stands still nor those behind it; what has come is taken."""
    disk.stop_at(1)
    store.read_ahead(["front"], [[0, 1], [2, 3]])
    assert disk.began.wait(LIMIT_S)
    assert [value(store, number) for number in range(4)] == [0, 1, 2, 3]
    assert disk.reads == [(0, False), (1, False), (1, True), (2, True), (3, True)]
    assert store.n_ahead == 1
    store.read_ahead(["front"], [[4, 5]])
    disk.go_on[1].set()
    settle(store)
    # Rows that the training has read itself are not read again.
    assert disk.reads[5:] == [(4, False), (5, False)]


def test_what_is_no_longer_wanted_makes_room(store: ActivationStore, disk: Disk) -> None:
    disk.stop_at(2)
    store.read_ahead(["front"], [[0, 1], [2, 3]])
    assert disk.began.wait(LIMIT_S)
    store.read_ahead(["front"], [[3, 4]])
    disk.go_on[2].set()
    settle(store)
    assert [number for number, _ in disk.reads] == [0, 1, 2, 3, 4]
    assert set(store._folder._reads) == {("front", 3), ("front", 4)}


def test_rows_that_are_read_ahead_have_limited_room(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 3  # rows
    for rows, room in ((0, 0), (0, 1), (size, None)):
        folder = EntryFolder(tmp_path / f"{rows} {room}", 0, 1 << 20)
        store = ActivationStore(0, folder)
        store.begin("front")
        keep(store)
        of_file = store.disk_used // N_ROWS
        monkeypatch.setattr(
            store._folder, "_ahead_room", size * of_file + 50 if room is None else room
        )
        store.read_ahead(["front"], [[4, 5], [6, 7]])
        assert [number for _, number in store._folder._reads] == [4, 5, 6][:rows]
        store.close()


def test_only_batches_that_are_there_as_a_whole_are_read_ahead(
    store: ActivationStore, disk: Disk
) -> None:
    store.drop("front", 2)
    store.read_ahead(["front"], [[0, 1], [2, 3], [4, 99], [5]])
    settle(store)
    assert [number for number, _ in disk.reads] == [0, 1, 5]


def test_rows_in_memory_are_not_read_ahead(tmp_path: Path, disk: Disk) -> None:
    store = ActivationStore(2 * 4 * 8, EntryFolder(tmp_path, 0, 1 << 20))
    store.begin("front")
    keep(store)
    store.read_ahead(["front"], [[1, 2], [0, 3]])
    settle(store)
    assert [number for number, _ in disk.reads] == [2, 3]
    store.close()
    ActivationStore(1 << 20, None).read_ahead(["front"], [[0]])  # nothing to read from


def test_a_batch_comes_from_the_first_front_that_has_it(store: ActivationStore) -> None:
    store.begin("deeper", older=["front"])
    store.offer([row(1)], torch.full((1, 8), 100.0))
    store.flush()
    store.read_ahead(["deeper", "front"], [[1], [1, 2]])
    settle(store)
    assert set(store._folder._reads) == {("deeper", 1), ("front", 1), ("front", 2)}
    assert [value(store, 1, front) for front in ("deeper", "front")] == [100, 1]


@pytest.mark.parametrize("is_cut_before", [True, False])
def test_a_cut_file_is_a_miss_that_is_told_once(
    store: ActivationStore,
    disk: Disk,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    is_cut_before: bool,
) -> None:
    """One that is cut after it was read ahead is as good as it was."""
    files = [next(tmp_path.rglob(f"{number}.safetensors")) for number in (1, 2)]
    for file in files if is_cut_before else ():
        file.write_bytes(file.read_bytes()[:-1])
    store.read_ahead(["front"], [[0, 1], [2, 3]])
    settle(store)
    for file in () if is_cut_before else files:
        file.write_bytes(file.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        found = [value(store, number) for number in range(4)]
    assert found == ([0, None, None, 3] if is_cut_before else [0, 1, 2, 3])
    assert len(disk.reads) == 4
    told = [record.message for record in caplog.records]
    assert len(told) == is_cut_before
    if is_cut_before:
        assert "1.safetensors is cut" in told[0]
        assert [store.has("front", row(number)) for number in range(4)] == [
            True,
            False,
            False,
            True,
        ]
        keep(store)
        assert [value(store, number) for number in (1, 2)] == [1, 2]


def test_a_row_with_other_tokens_is_missing(store: ActivationStore) -> None:
    """What is read ahead is known by its number alone: tokens are known with the batch."""
    store.read_ahead(["front"], [[0]])
    settle(store)
    assert store.read("front", Row(0, "other tokens")) is None
    assert not store.has("front", row(0))


def test_a_row_that_was_dropped_while_it_was_read_does_not_come_back(
    store: ActivationStore, disk: Disk
) -> None:
    disk.stop_at(0)
    store.read_ahead(["front"], [[0, 1]])
    assert disk.began.wait(LIMIT_S)
    store.drop("front", 0)
    store.drop("front", 1)
    disk.go_on[0].set()
    store.read_ahead(["front"], [[2]])
    settle(store)
    assert set(store._folder._reads) == {("front", 2)}
    assert [value(store, number) for number in (0, 1)] == [None, None]


def test_another_front_forgets_what_was_read_ahead(store: ActivationStore, disk: Disk) -> None:
    disk.stop_at(1)
    store.read_ahead(["front"], [[0, 1, 2]])
    assert disk.began.wait(LIMIT_S)
    store.begin("other")  # would hang if it waited for the disk
    assert store._folder._reads == {}
    disk.go_on[1].set()


def test_closing_ends_the_thread_and_leaves_rows_unread(tmp_path: Path, disk: Disk) -> None:
    store = ActivationStore(0, EntryFolder(tmp_path, 0, 1 << 20))
    store.begin("front")
    keep(store)
    go_on = disk.stop_at(0)
    store.read_ahead(["front"], [list(range(N_ROWS))])
    assert disk.began.wait(LIMIT_S)
    (reader,) = [t for t in threading.enumerate() if t.name.startswith("cache-reader")]
    closing = threading.Thread(target=store.close)
    closing.start()
    while store._folder._reads:
        assert closing.is_alive()
    go_on.set()
    closing.join(LIMIT_S)
    assert not closing.is_alive()
    assert not reader.is_alive()
    # At most the row behind the one that was being read, when it was told to stop.
    assert len(disk.reads) <= 2


def test_an_error_of_the_thread_is_the_training_s(
    store: ActivationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the training had read the row; the thread goes on with the next."""
    read = folder_module.read_entry

    def failing(folder: Path, number: int) -> Entry:
        if number == 0:
            raise MemoryError("no room")
        return read(folder, number)

    monkeypatch.setattr(folder_module, "read_entry", failing)
    store.read_ahead(["front"], [[0, 1]])
    settle(store)
    assert value(store, 1) == 1
    assert store.n_ahead == 1
    with pytest.raises(MemoryError, match="no room"):
        store.read("front", row(0))
