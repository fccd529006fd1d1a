"""The store: memory first, then disk, within both limits, and behind the training."""

import logging
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from timelyfreeze.front.caching import ActivationStore, EntryFolder, Row, in_use
from timelyfreeze.front.caching import folder as folder_module

MEMORY = 2 * 4 * 8  # two rows of 8 float32


def output(number: int) -> Tensor:
    return torch.full((1, 8), float(number))


def row(number: int) -> Row:
    return Row(number, f"tokens {number}")


def begun(memory_bytes: int, place: EntryFolder | None) -> ActivationStore:
    store = ActivationStore(memory_bytes, place)
    store.begin("front")
    return store


def filled(store: ActivationStore, numbers: range) -> None:
    for number in numbers:
        store.offer([row(number)], output(number))
    store.flush()


def found(store: ActivationStore, numbers: range, front: str = "front") -> list[int]:
    """Which rows are there; each must have its own output."""
    there = [number for number in numbers if store.has(front, row(number))]
    for number in there:
        read = store.read(front, row(number))
        assert read is not None
        assert torch.equal(read, output(number)[0])
    return there


def disk(folder: Path, *, room: int = 1 << 20, rank: int = 0) -> EntryFolder:
    return EntryFolder(folder, rank, room)


def test_rows_go_to_memory_then_to_the_disk_then_nowhere(tmp_path: Path) -> None:
    """A limit of room, where AutoFreeze (Sec. 3.2) has writes that never exceed reads."""
    place = disk(tmp_path, room=600)
    store = begun(MEMORY, place)
    filled(store, range(10))
    sizes = [f.stat().st_size for f in tmp_path.rglob("*.safetensors")]
    assert 1 <= len(sizes) < 8
    assert sum(sizes) == store.disk_used <= 600
    assert store.memory_used == MEMORY
    assert found(store, range(10)) == list(range(2 + len(sizes)))
    store.close()


def test_what_was_offered_may_be_written_over_at_once() -> None:
    store = begun(MEMORY, None)
    buffer = output(1)
    store.offer([row(1)], buffer)
    buffer.zero_()
    store.flush()
    assert found(store, range(2)) == [1]


def test_rows_of_a_microbatch_are_stored_one_by_one() -> None:
    store = begun(MEMORY, None)
    store.offer([row(3)], output(3))
    store.flush()
    assert store.offer([row(3), row(4)], torch.cat([output(3), output(4)])) == 1
    store.flush()
    assert found(store, range(5)) == [3, 4]


def test_a_row_that_comes_twice_in_a_microbatch_is_stored_once(tmp_path: Path) -> None:
    for memory in (MEMORY, 0):
        store = begun(memory, disk(tmp_path / str(memory)))
        twice = [row(3), row(3), row(4)]
        assert store.offer(twice, torch.cat([output(3), output(3), output(4)])) == 2
        store.flush()
        assert found(store, range(5)) == [3, 4]
        store.close()


def test_a_row_with_other_tokens_is_missing(tmp_path: Path) -> None:
    for memory in (MEMORY, 0):
        store = begun(memory, disk(tmp_path))
        filled(store, range(1))
        other = Row(0, "other tokens")
        assert store.read("front", other) is None
        store.close()


def test_another_front_finds_nothing_and_deletes_the_files(tmp_path: Path) -> None:
    store = begun(MEMORY, disk(tmp_path))
    filled(store, range(6))
    store.begin("other")
    assert found(store, range(6), "other") == []
    assert (store.memory_used, store.disk_used) == (0, 0)
    store.flush()
    assert list(tmp_path.rglob("*.safetensors")) == []
    store.close()


def test_rows_of_an_older_front_stay_until_they_are_dropped(tmp_path: Path) -> None:
    store = begun(MEMORY, disk(tmp_path, room=500))
    filled(store, range(3))
    store.begin("deeper", older=["front"])
    assert found(store, range(3)) == [0, 1, 2]
    assert found(store, range(3), "deeper") == []
    store.drop("front", 1)  # from memory
    assert (store.memory_used, found(store, range(3))) == (MEMORY // 2, [0, 2])
    filled(store, range(1, 2))
    assert (store.memory_used, found(store, range(3), "deeper")) == (MEMORY, [1])
    before = store.disk_used
    store.drop("front", 2)  # from the disk
    assert store.disk_used < before
    assert list(tmp_path.rglob("*.safetensors")) == []
    store.begin("deepest", older=["deeper"])
    assert found(store, range(3), "deeper") == [1]
    assert store.memory_used == MEMORY // 2
    store.close()


def test_rows_of_the_shallowest_front_make_room_first() -> None:
    store = ActivationStore(6 * 4 * 8, None)
    for front, older in (("a", []), ("b", ["a"])):
        store.begin(front, older)
        filled(store, range(3))
    store.begin("c", ["b", "a"])
    filled(store, range(4))
    assert [found(store, range(6), front) for front in "abc"] == [[], [1, 2], [0, 1, 2, 3]]
    filled(store, range(4, 8))
    assert [found(store, range(9), front) for front in "abc"] == [[], [], [0, 1, 2, 3, 4, 5]]
    assert store.memory_used == 6 * 4 * 8
    store.close()


class SlowlyForgotten(set[int]):
    """Rows that wait, of which one is struck off long after it is asked for."""

    def discard(self, number: int) -> None:
        time.sleep(0.02)
        super().discard(number)


def test_a_row_that_is_being_stored_takes_room_once() -> None:
    store = ActivationStore(6 * 4 * 8, None)
    store.begin("shallow")
    filled(store, range(3))
    store.begin("deep", ["shallow"])
    store._waiting = SlowlyForgotten()
    filled(store, range(3))
    assert [found(store, range(6), front) for front in ("shallow", "deep")] == [[0, 1, 2]] * 2
    store.close()


def test_files_of_shallower_fronts_make_room_too(tmp_path: Path) -> None:
    store = begun(0, disk(tmp_path, room=1500))
    filled(store, range(20))
    n_files = len(found(store, range(20)))
    assert 2 < n_files < 20
    store.begin("deeper", ["front"])
    filled(store, range(n_files - 1))
    assert found(store, range(20), "deeper") == list(range(n_files - 1))
    assert len(found(store, range(20), "front")) <= 1
    assert sum(f.stat().st_size for f in tmp_path.rglob("*.safetensors")) == store.disk_used <= 1500
    store.close()


def test_a_run_that_goes_on_finds_what_is_on_the_disk(tmp_path: Path) -> None:
    store = begun(MEMORY, disk(tmp_path))
    filled(store, range(6))
    store.close()
    again = ActivationStore(MEMORY, disk(tmp_path))
    again.begin("front")
    assert found(again, range(6)) == [2, 3, 4, 5]
    again.close()


def test_processes_that_share_a_folder_find_each_others_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """PipeTransformer (Sec. 3.4) has a process with shared memory for it."""
    one, other = (ActivationStore(0, disk(tmp_path, rank=rank)) for rank in (0, 1))
    for store in (one, other):
        store.begin("front", part=0.5)
    filled(one, range(3))
    assert found(other, range(6)) == [0, 1, 2]
    filled(other, range(6))
    assert found(one, range(6)) == list(range(6))
    # No row is written twice, and what both count is what there is.
    sizes = [f.stat().st_size for f in tmp_path.rglob("*.safetensors")]
    assert (len(sizes), sum(sizes)) == (6, one.disk_used + other.disk_used)
    one.drop("front", 1)
    with caplog.at_level(logging.WARNING):
        assert not other.has("front", row(1))
        assert other.read("front", row(1)) is None  # it had looked before
    assert caplog.records == []
    filled(other, range(6))
    assert found(one, range(6)) == list(range(6))
    for store in (one, other):
        store.close()


def test_processes_that_write_the_same_row_leave_a_whole_one(tmp_path: Path) -> None:
    """Files are so long that several writers are in the midst of one at the same time."""
    folders = [disk(tmp_path, room=1 << 30, rank=rank) for rank in range(3)]
    wanted = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1))
    start = threading.Barrier(len(folders))
    errors = []

    def write(folder: EntryFolder) -> None:
        start.wait(60)
        try:
            for _ in range(8):
                folder.write("front", row(1), wanted)
                # Not mapped into memory: a file that shrinks would end the process.
                (file,) = (tmp_path / "front").glob("*.safetensors")
                assert torch.equal(load(file.read_bytes())["output"], wanted)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(folder,)) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [f.name for f in tmp_path.rglob("*") if f.is_file() and f.suffix != ".lock"] == [
        "1.safetensors"
    ]
    for folder in folders:
        folder.close()


def test_processes_that_share_a_folder_keep_to_its_limit_together(tmp_path: Path) -> None:
    """Each takes its part of what is free, also where rows of a shallower front are dropped."""
    room = 5000
    first = ActivationStore(0, disk(tmp_path, room=room))
    first.begin("front")
    filled(first, range(8))
    first.close()
    one, other = (ActivationStore(0, disk(tmp_path, room=room, rank=rank)) for rank in (0, 1))
    for store in (one, other):
        store.begin("deeper", ["front"], part=0.5)
    for n in range(40):
        filled(one, range(n, n + 1))
        filled(other, range(100 + n, 101 + n))
        written = sum(f.stat().st_size for f in tmp_path.rglob("*.safetensors"))
        assert written == one.disk_used + other.disk_used <= room
    rows = [len(found(one, numbers, "deeper")) for numbers in (range(40), range(100, 140))]
    of_file = next(tmp_path.rglob("100.safetensors")).stat().st_size
    assert sum(rows) >= room // of_file - 2
    assert abs(rows[0] - rows[1]) <= 8
    assert found(one, range(8)) == []
    for store in (one, other):
        store.close()


def test_a_process_that_writes_nothing_takes_no_room(tmp_path: Path) -> None:
    store = ActivationStore(0, disk(tmp_path))
    store.begin("front", part=0.0)
    filled(store, range(3))
    assert found(store, range(3)) == []
    store.close()


def test_rows_in_memory_are_handed_over_as_far_as_there_is_room(tmp_path: Path) -> None:
    for room, n_found in ((1 << 20, 6), (700, 3)):
        folder = tmp_path / str(room)
        store = begun(3 * MEMORY, disk(folder, room=room))
        filled(store, range(3))
        store.begin("deeper", ["front"])
        filled(store, range(3))
        assert list(folder.rglob("*.safetensors")) == []
        store.hand_over()
        store.close()
        other = ActivationStore(MEMORY, disk(folder, room=room, rank=1))
        other.begin("deeper", ["front"])
        both = [*found(other, range(3), "deeper"), *found(other, range(3))]
        assert len(both) == n_found
        assert both[:3] == [0, 1, 2]  # of the deeper front first
        other.close()


def test_a_front_that_others_delete_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = begun(0, disk(tmp_path))
    write = folder_module.write_entry

    def deleted(*_: object) -> int:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(folder_module, "write_entry", deleted)
    with caplog.at_level(logging.WARNING):
        filled(store, range(2))
    monkeypatch.setattr(folder_module, "write_entry", write)
    filled(store, range(2, 4))
    assert caplog.records == []
    assert found(store, range(4)) == [2, 3]
    store.close()


def test_a_cut_file_is_a_miss_that_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = begun(0, disk(tmp_path))
    filled(store, range(3))
    for file in tmp_path.rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        assert [store.read("front", row(number)) for number in range(3)] == [None] * 3
    assert len(caplog.records) == 1
    assert not any(store.has("front", row(number)) for number in range(3))
    filled(store, range(3))
    assert found(store, range(3)) == [0, 1, 2]
    store.close()


def test_a_full_disk_is_told_once_and_what_is_there_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = begun(0, disk(tmp_path))
    filled(store, range(2))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder_module, "write_entry", full)
    with caplog.at_level(logging.WARNING):
        filled(store, range(2, 6))
    assert [record.message for record in caplog.records] == [
        "The activation cache writes no more files: [Errno 28] No space left on device; training "
        "goes on, and reads those that are there"
    ]
    assert found(store, range(6)) == [0, 1]
    store.close()


def test_a_slow_writer_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    write = folder_module.write_entry
    monkeypatch.setattr(folder_module, "write_entry", lambda *args: go_on.wait(60) and write(*args))
    store = begun(0, disk(tmp_path))
    # would hang if it waited
    assert sum(store.offer([row(number)], output(number)) for number in range(100)) == 64
    go_on.set()
    store.flush()
    assert found(store, range(100)) == list(range(64))
    filled(store, range(100))
    assert found(store, range(100)) == list(range(100))
    store.close()


def test_two_runs_cannot_have_one_folder(tmp_path: Path) -> None:
    first = disk(tmp_path)
    assert in_use(tmp_path, 0)
    assert not in_use(tmp_path, 1)
    with pytest.raises(ValueError, match=r"cache\.folder is '.*', which another run uses"):
        disk(tmp_path)
    disk(tmp_path, rank=1).close()
    first.close()
    assert not in_use(tmp_path, 0)
    disk(tmp_path).close()


def test_looking_leaves_nothing_behind(tmp_path: Path) -> None:
    assert not in_use(tmp_path / "missing", 0)
    assert os.listdir(tmp_path) == []


def test_a_row_with_other_tokens_takes_the_place_of_the_one_before() -> None:
    store = begun(MEMORY, None)
    for tokens in ("a", "b", "c"):
        store.offer([Row(1, tokens)], output(1))
        store.flush()
    assert store.memory_used == output(1).nbytes
    assert [store.has("front", Row(1, tokens)) for tokens in "abc"] == [False, False, True]
    store.close()
