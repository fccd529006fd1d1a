"""Long lists of JSON files: the items that json.loads finds, in little memory."""

import gzip
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from timelyfreeze.files import long_list
from timelyfreeze.files.long_list import has_list, items_of


def random_item(rng: random.Random) -> Any:
    texts = ["", "a", "ünïcode \U0001f600", '"]}', "\\", "events", "x" * 50]
    return {rng.choice(texts): rng.choice([rng.random(), None, [rng.choice(texts)], {"a": {}}])}


@pytest.mark.parametrize("chunk", [64, 65, 70, 101, 2**20])
@pytest.mark.parametrize("indent", [None, 2])
def test_items_are_those_of_json_wherever_a_chunk_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, indent: int | None
) -> None:
    rng = random.Random(chunk)
    data = {"a": [1], "events": [random_item(rng) for _ in range(200)], "b": "]"}
    text = json.dumps(data, indent=indent, ensure_ascii=chunk % 2 == 0)
    monkeypatch.setattr(long_list, "_CHUNK", chunk)
    for name, raw in (("a.json", text.encode()), ("a.json.gz", gzip.compress(text.encode()))):
        path = tmp_path / name
        path.write_bytes(raw)
        assert list(items_of(path, "events")) == data["events"]
        assert has_list(path, "events")
        assert not has_list(path, "other")


def test_memory_does_not_grow_with_the_list(tmp_path: Path) -> None:
    path = tmp_path / "long.json"
    with path.open("w") as file:
        file.write('{"events": [0')
        for _ in range(120):
            file.write((',{"name": "' + "a" * 80 + '"}') * 1000)
        file.write("]}")
    assert path.stat().st_size > 11_000_000
    tracemalloc.start()
    assert sum(1 for _ in items_of(path, "events")) == 120_001
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8_000_000


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"other": [1]}', 'no list "events" is in its beginning'),
        (b'{"events": {"a": 1}}', 'no list "events" is in its beginning'),
        (b'{"events": [{"a": 1}, {"b": ', "is no JSON or was cut off: '{\"b\": '"),
        (b'{"events": [{"a": 1}, oh]}', "an item of events is no JSON"),
        (b'{"events": [' + b'{"a":' * 100_000, "nested too deeply"),
        (b"\x1f\x8bno gzip", "it cannot be read"),
        (gzip.compress(b'{"events": [1, 2, 3]}')[:-9], "it cannot be read"),
    ],
)
def test_a_broken_file_says_why(tmp_path: Path, raw: bytes, said: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"an item|no list|it cannot") as error:
        list(items_of(path, "events"))
    assert said in str(error.value)


def test_a_file_that_is_not_there_has_no_list(tmp_path: Path) -> None:
    assert not has_list(tmp_path / "none.json", "events")
    assert not has_list(tmp_path, "events")
    with pytest.raises(ValueError, match=r"cannot be read: .*No such file"):
        list(items_of(tmp_path / "none.json", "events"))


def test_a_bomb_and_a_giant_item_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_list, "_CHUNK", 2**10)
    monkeypatch.setattr(long_list, "_MOST_ITEM", 2**14)
    monkeypatch.setattr(long_list, "MOST_CHARACTERS", 2**20)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b'{"events": [' + b'{"a": 1},' * 10**6))
    with pytest.raises(ValueError, match="at most 1 MiB, unpacked; record less"):
        list(items_of(path, "events"))
    path.write_bytes(gzip.compress(b'{"events": ["' + b"a" * 10**6 + b'"]}'))
    with pytest.raises(ValueError, match="an item of events is no JSON of at most"):
        list(items_of(path, "events"))
