"""Each wrong thing of a host, faked."""

from __future__ import annotations

import re
import socket
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from timelyfreeze.cli.doctor import host
from timelyfreeze.cli.doctor import host as address
from timelyfreeze.cli.doctor.host import (
    Finding,
    cores,
    devices,
    disk,
    host_findings,
    meeting_place,
    package,
    reached,
    render,
    shared_memory,
)
from timelyfreeze.runtime import torch_releases

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
    ("name", "found", "is_wrong", "said"),
    [
        ("torch", None, True, "not installed"),
        ("torch", "2.12.1", True, "2.12.1"),
        ("torch", "2.16.0", True, "2.16.0"),
        ("torch", "2.14.0+cu130", False, "2.14.0+cu130"),
        ("torch", "2.13.0+cu130", False, "2.13.0"),
        ("torchtitan", "0.3.0", True, "0.3.0"),
    ],
)
def test_packages(name: str, found: str | None, is_wrong: bool, said: str) -> None:
    finding = package(name, found)
    assert finding.is_wrong is is_wrong
    assert said in finding.found


def test_the_releases_are_those_that_are_installed_and_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = (ROOT / "constraints.txt").read_text()
    first, end = host.RELEASES["torch"]
    assert f"torch>={first},<{end}" in project["dependencies"]
    assert [f"{a}.{b}" for a, b in (torch_releases.FIRST, torch_releases.END)] == [first, end]
    tested = re.search(r"^torch==(.*)$", pinned, re.M)
    assert tested is not None
    assert not package("torch", tested[1]).is_wrong
    first, _ = host.RELEASES["torchtitan"]
    assert f"torchtitan=={first}" in project["optional-dependencies"]["titan"]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two GPUs with nothing on them, and shared memory; tests change what they have."""
    has = {"n": 2, "free": 80 * GIB}
    monkeypatch.setattr(host.shutil, "disk_usage", lambda place: Usage(2 * GIB))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has["n"] > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: has["n"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "Abacus")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (has["free"], 80 * GIB))
    return has


def wrong(findings: Any) -> list[str]:
    return [each.found for each in findings if each.is_wrong]


def test_devices_that_are_as_they_should(gpus: dict[str, Any]) -> None:
    found = list(devices(2, 2))
    assert not wrong(found)
    assert found[0].found == "Abacus, 80.0 GiB, of which 80.0 are free"
    assert found[-2].found == "1 of 1 pairs of GPUs are linked directly"
    assert found[-1].subject == "/dev/shm"
    gpus["n"] = 1
    assert len(list(devices(1, 1))) == 1, "one device has nobody to send to"


def test_devices_that_torch_does_not_see_or_that_others_have(gpus: dict[str, Any]) -> None:
    assert wrong(devices(2, 4)) == ["4 processes and 2 GPUs: all ranks would use the CPU"]
    gpus["free"] = 60 * GIB
    assert wrong(devices(2, 2)) == ["Abacus, 80.0 GiB, of which 60.0 are free"] * 2
    gpus["n"] = 0
    (said,) = wrong(devices(2, 2))
    assert said.startswith("the driver lists 2 GPUs, torch ")
    assert said.endswith(" sees 0")


def test_shared_memory_matters_between_gpus() -> None:
    assert shared_memory(64 * 2**20).is_wrong
    assert not shared_memory(2 * GIB).is_wrong


def test_folders_without_room_or_that_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert disk(file / "run").is_wrong
    new = tmp_path / "not" / "yet"
    monkeypatch.setattr(host.shutil, "disk_usage", lambda place: Usage(3 * GIB))
    assert not disk(new).is_wrong
    monkeypatch.setattr(host.shutil, "disk_usage", lambda place: Usage(GIB // 2))
    full = disk(new)
    assert full.is_wrong
    assert "0.5 GiB free" in full.found
    assert not new.exists()


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
    subjects = [each.subject for each in host_findings(1, Path("outputs"))]
    assert subjects == [
        "torch", "torchtitan", "devices", "job.dump_folder", "cores",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "variables", "place"),
    [
        ((), {}, None),
        (("--nnodes=2", "--master_addr=a", "--master_port=7"), {}, ("a", 7)),
        (("--master-addr", "a", "--master-port", "7"), {}, ("a", 7)),
        (("--master_addr=a",), {"MASTER_ADDR": "b"}, ("a", 29500)),
        (("--rdzv_backend=c10d", "--rdzv_endpoint=a:8"), {}, ("a", 8)),
        ((), {"PET_RDZV_ENDPOINT": "c:9"}, ("c", 9)),
        ((), {"MASTER_ADDR": "b", "MASTER_PORT": "5"}, ("b", 5)),
    ],
)
def test_where_ranks_meet(
    options: Sequence[str], variables: Mapping[str, str], place: tuple[str, int] | None
) -> None:
    assert meeting_place(options, variables) == place


@pytest.mark.parametrize("endpoint", ["a:x", "a:70000"])
def test_a_port_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match=rf"meet at '{endpoint}'; it must be HOST:PORT"):
        meeting_place([f"--rdzv_endpoint={endpoint}"], {})


def test_a_port_of_this_host_must_be_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = reached("127.0.0.1", port)
        assert taken.is_wrong
        assert "the port is taken" in taken.found
    assert reached("127.0.0.1", port).found.endswith("is this host, and the port is free")


def test_a_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(address.socket, "gethostbyname", unknown)
    assert "node7:1 is not known here" in reached("node7", 1).found
    assert reached("node7", 1).is_wrong


@pytest.mark.parametrize(
    ("error", "is_wrong", "said"),
    [
        (None, False, "is reached"),
        (ConnectionRefusedError(), False, "nothing listens there yet"),
        (TimeoutError("timed out"), True, "is not reached within 5 s: timed out"),
        (OSError(113, "No route to host"), True, "No route to host"),
    ],
)
def test_another_host(
    monkeypatch: pytest.MonkeyPatch, error: OSError | None, is_wrong: bool, said: str
) -> None:
    def connect(place: tuple[str, int], timeout: float) -> socket.socket:
        if error is not None:
            raise error
        return socket.socket()

    monkeypatch.setattr(address, "_can_listen", lambda *place: False)
    monkeypatch.setattr(address.socket, "create_connection", connect)
    found = reached("192.0.2.1", 29500)
    assert found.is_wrong is is_wrong
    assert said in found.found
