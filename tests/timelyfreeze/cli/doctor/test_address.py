"""Ports and hosts, real ones of this machine and pretended ones."""

import socket
from collections.abc import Mapping, Sequence

import pytest

from timelyfreeze.cli.doctor import host as address
from timelyfreeze.cli.doctor.host import meeting_place, reached


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
