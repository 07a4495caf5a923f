"""Tells a shortage of this process from a failure of its peer.

The system reports some shortages as something else: a resolver that cannot open its files says
that the name does not exist, TLS that cannot read the authorities' certificates says that the peer
is not trusted. Before such a failure is blamed on the peer, `check_descriptors` is asked.
"""

from __future__ import annotations

import errno
import socket

from conveyor.net.errors import FetchFailed, OutOfResources
from conveyor.ports.errors import is_resource_shortage

DETAIL = "this worker is out of descriptors, memory, threads or ports"


def check_descriptors() -> None:
    """Raises OutOfResources when this process can open no descriptor."""
    try:
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()
    except OSError as error:
        if is_resource_shortage(error):
            raise OutOfResources(DETAIL) from error


def judge_connect(error: OSError, address: str, port: int) -> FetchFailed | None:
    """OutOfResources when a failed connect to `address` was this process's own shortage, else
    None."""
    if error.errno == errno.EADDRNOTAVAIL:
        # Either all local ports are in use, or this machine has no address that could reach the
        # peer, which is what a host without IPv6 says of every IPv6 address.
        return OutOfResources(DETAIL) if _has_source_address(address, port) else None
    # A connect under way says EINPROGRESS. EAGAIN is what Linux says for want of ports.
    is_short = error.errno == errno.EAGAIN or is_resource_shortage(error)
    return OutOfResources(DETAIL) if is_short else None


def _has_source_address(address: str, port: int) -> bool:
    """Whether a packet to the peer would have an address to come from. Nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, port))
    except OSError as error:
        return is_resource_shortage(error) and error.errno != errno.EADDRNOTAVAIL
    return True
