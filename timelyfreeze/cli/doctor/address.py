"""Whether a port can be opened here, and the host be reached at which ranks meet."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from timelyfreeze.cli.doctor.finding import Finding

_PORT = 29500
_TIMEOUT_S = 5.0


def meeting_place(options: Sequence[str], variables: Mapping[str, str]) -> tuple[str, int] | None:
    """Return host and port at which ranks meet, of torchrun's options or the environment.

    None where neither names one. torchrun's port is 29500 unless told otherwise.

    Raises:
        ValueError: If the port is none.
    """
    words = re.findall(r"--([\w-]+)[= ]([^ ]+)", " ".join(options))
    told = {name.replace("-", "_"): value for name, value in words}
    endpoint = told.get("rdzv_endpoint") or variables.get("PET_RDZV_ENDPOINT", "")
    if "master_addr" in told:
        endpoint = f"{told['master_addr']}:{told.get('master_port', _PORT)}"
    if not endpoint and "MASTER_ADDR" in variables:
        endpoint = f"{variables['MASTER_ADDR']}:{variables.get('MASTER_PORT', _PORT)}"
    host, _, port = endpoint.partition(":")
    if port and not (port.isdecimal() and int(port) < 2**16):
        raise ValueError(f"ranks are to meet at {endpoint!r}; it must be HOST:PORT")
    return (host, int(port or _PORT)) if host else None


def address_findings(place: tuple[str, int] | None) -> Iterator[Finding]:
    """Look whether processes of this host can meet, with each other and with other hosts."""
    yield _port()
    if place is None:
        yield Finding("meeting place", "none named (MASTER_ADDR, --master_addr, --rdzv_endpoint)")
        return
    yield _reached(*place)


def _port() -> Finding:
    try:
        with socket.create_server(("localhost", 0)) as server:
            return Finding("port", f"one can be opened ({server.getsockname()[1]})")
    except OSError as error:
        return Finding("port", f"none can be opened: {error}", "see ulimit -n and the firewall")


def _reached(host: str, port: int) -> Finding:
    """A connection that is refused has reached the host: nothing listens there yet."""
    subject, name = "meeting place", f"{host}:{port}"
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        return Finding(
            subject, f"{host} is not known here: {error}", "give its IP address as master_addr"
        )
    if _is_here(address):
        with suppress(OSError), socket.create_server((address, port)):
            return Finding(subject, f"{name} is this host, and the port is free")
        return Finding(
            subject,
            f"{name} is this host, and the port is taken",
            "choose another master_port, the same on all nodes",
        )
    try:
        socket.create_connection((address, port), timeout=_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return Finding(subject, f"{name} is reached; nothing listens there yet")
    except OSError as error:
        return Finding(
            subject,
            f"{name} is not reached within {_TIMEOUT_S:g} s: {error}",
            "see that master_addr is right and the firewall lets that port through",
        )
    return Finding(subject, f"{name} is reached")


def _is_here(address: str) -> bool:
    with suppress(OSError), socket.create_server((address, 0)):
        return True
    return False
