"""Each wrong thing of a host, faked."""

import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from timelyfreeze.cli.doctor import host
from timelyfreeze.cli.doctor.finding import Finding, render
from timelyfreeze.cli.doctor.host import (
    Folder,
    cores,
    devices,
    disk,
    folders_of,
    host_findings,
    package,
    python,
    shared_memory,
)

ROOT = Path(__file__).resolve().parents[4]
GIB = 2**30


class Usage(NamedTuple):
    free: int


def test_a_wrong_line_is_followed_by_what_to_do() -> None:
    said = render([Finding("python", "3.11.9"), Finding("/dev/shm", "64 MiB", "more of it")])
    assert said.splitlines() == [
        "ok     python    3.11.9",
        "wrong  /dev/shm  64 MiB",
        "                 -> more of it",
    ]


@pytest.mark.parametrize(
    ("found", "is_wrong"), [((3, 10, 1), True), ((3, 11, 0), False), ((3, 13, 0), True)]
)
def test_python(found: tuple[int, ...], is_wrong: bool) -> None:
    assert python(found).is_wrong is is_wrong


@pytest.mark.parametrize(
    ("name", "found", "is_wrong", "said"),
    [
        ("torch", None, True, "not installed"),
        ("torch", "2.10.1", True, "2.10.1, tested is 2.13.0"),
        ("torch", "2.14.0", True, "2.14.0, tested is"),
        ("torch", "2.11.0+cu130", False, "tested is 2.13.0"),
        ("torch", "2.13.0+cu130", False, "the tested release"),
        ("torchtitan", "0.3.0", True, "tested is 0.2.2"),
        ("timelyfreeze", "0.1.0", False, "0.1.0"),
    ],
)
def test_packages(name: str, found: str | None, is_wrong: bool, said: str) -> None:
    finding = package(name, found)
    assert finding.is_wrong is is_wrong
    assert said in finding.found


def test_the_releases_are_those_that_are_installed_and_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = (ROOT / "constraints.txt").read_text()
    first, end, tested = host.RELEASES["torch"]
    assert f"torch>={first},<{end}" in project["dependencies"]
    assert re.search(rf"^torch=={tested}$", pinned, re.M)
    titan = host.RELEASES["torchtitan"]
    assert f"torchtitan=={titan[0]}" in project["optional-dependencies"]["titan"]
    assert titan[0] == titan[2]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two GPUs with nothing on them and a link between; tests change what they have."""
    has = {"n": 2, "free": 80 * GIB, "peer": True}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has["n"] > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: has["n"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "Abacus")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (has["free"], 80 * GIB))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: has["peer"])
    return has


def wrong(findings: Any) -> list[str]:
    return [each.found for each in findings if each.is_wrong]


def test_devices_that_are_as_they_should(gpus: dict[str, Any]) -> None:
    found = list(devices(2, 2))
    assert not wrong(found)
    assert found[0].found == "Abacus, 80.0 GiB, of which 80.0 are free"
    assert found[-1].found == "2 of 2 pairs of GPUs are linked directly"
    gpus["peer"] = False
    assert "0 of 2 pairs of GPUs are linked directly; others pass" in list(devices(2, 2))[-1].found


def test_devices_that_torch_does_not_see_or_that_others_have(gpus: dict[str, Any]) -> None:
    assert wrong(devices(2, 4)) == ["4 processes and 2 GPUs: all ranks would use the CPU"]
    gpus["free"] = 60 * GIB
    assert wrong(devices(2, 2)) == ["Abacus, 80.0 GiB, of which 60.0 are free"] * 2
    gpus["n"] = 0
    (said,) = wrong(devices(2, 2))
    assert said.startswith("the driver lists 2 GPUs, torch ")
    assert said.endswith(" sees 0")


def test_no_device_has_no_links() -> None:
    assert [each.found for each in devices(0, 4)] == [
        "no GPU; ranks use the CPU", "none, there is no GPU",
    ]  # fmt: skip


def test_shared_memory_matters_between_gpus() -> None:
    small = 64 * 2**20
    assert shared_memory(small, 2).is_wrong
    assert not shared_memory(small, 0).is_wrong
    assert not shared_memory(2 * GIB, 8).is_wrong


def test_folders_without_room_or_that_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert disk(Folder(file / "run", "job.dump_folder")).is_wrong
    monkeypatch.setattr(host.shutil, "disk_usage", lambda place: Usage(3 * GIB))
    new = tmp_path / "not" / "yet"
    assert not disk(Folder(new, "job.dump_folder")).is_wrong
    full = disk(Folder(new, "freezing.cache.folder", 4 * GIB))
    assert full.is_wrong
    assert "3.0 GiB free of 4.0 that it needs" in full.found
    assert not new.exists()


def test_the_folders_are_the_configuration_s() -> None:
    assert [each.path for each in folders_of({}, 2)] == [Path("outputs")]
    config = {"job": {"dump_folder": "a"}, "freezing": {"cache": {"disk_gib": 1.5, "folder": "b"}}}
    assert [(each.path, each.n_bytes) for each in folders_of(config, 2)] == [
        (Path("a"), GIB), (Path("a/b"), 3 * GIB),
    ]  # fmt: skip


def test_threads_for_which_there_are_no_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    crowded = cores(8.0, 4, 0)
    assert crowded.remedy == "set OMP_NUM_THREADS=2"
    assert not cores(16.0, 4, 0).is_wrong
    assert not cores(8.0, 4, 4).is_wrong, "ranks on GPUs hardly compute on cores"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shared = cores(2.0, 4, 0)
    assert not shared.is_wrong
    assert "ranks share cores" in shared.found


def test_a_host_has_a_line_for_each_subject(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "count_gpus", lambda variables: 0)
    subjects = [each.subject for each in host_findings(1, folders_of({}, 1))]
    assert subjects == [
        "python", "timelyfreeze", "torch", "torchtitan", "devices", "links", "/dev/shm",
        "job.dump_folder", "cores",
    ]  # fmt: skip
