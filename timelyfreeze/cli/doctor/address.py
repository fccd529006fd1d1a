"""Whether the host can be reached at which ranks meet."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
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


def reached(host: str, port: int) -> Finding:
    """Look whether processes of this host can meet there, be it here or on another host."""

    def found(what: str, remedy: str | None = None) -> Finding:
        return Finding("meeting place", f"{host}:{port} {what}", remedy)

    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        return found(f"is not known here: {error}", "give its IP address as master_addr")
    if _can_listen(address, 0):
        if _can_listen(address, port):
            return found("is this host, and the port is free")
        return found(
            "is this host, and the port is taken",
            "choose another master_port, the same on all nodes",
        )
    try:
        socket.create_connection((address, port), timeout=_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return found("is reached; nothing listens there yet")
    except OSError as error:
        return found(
            f"is not reached within {_TIMEOUT_S:g} s: {error}",
            "see that master_addr is right and the firewall lets that port through",
        )
    return found("is reached")


def _can_listen(address: str, port: int) -> bool:
    """Return whether a port of an address can be opened: 0, any, of each address of this host."""
    with suppress(OSError), socket.create_server((address, port)):
        return True
    return False
