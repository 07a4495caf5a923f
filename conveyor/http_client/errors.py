"""What can go wrong with one fetch. No message holds a path, a query or a header value."""

from __future__ import annotations

import errno
import socket

from conveyor.domain.errors import ConveyorError
from conveyor.ports.errors import is_resource_shortage

TOO_LATE = "no complete answer before the deadline"
TOO_SLOW = "the body arrives too slowly"


class FetchFailed(ConveyorError):
    """There is no response. `detail` is safe to show to the caller."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class OutOfResources(FetchFailed):
    """This process has no descriptor, memory, thread or port left for the fetch. Nothing was
    sent, and the site had no part in it."""


class ForbiddenTarget(FetchFailed):
    """The policy says no; no socket was opened."""


class NameNotResolved(FetchFailed):
    """The host has no address, or the resolver had no answer for now."""

    def __init__(self, detail: str, *, is_temporary: bool = False) -> None:
        super().__init__(detail)
        self.is_temporary = is_temporary


class ConnectFailed(FetchFailed):
    """No address of the host took the connection."""


class TlsFailed(FetchFailed):
    """The handshake failed; `is_untrusted` when the certificate was the reason."""

    def __init__(self, detail: str, *, is_untrusted: bool = False) -> None:
        super().__init__(detail)
        self.is_untrusted = is_untrusted


class ConnectionLost(FetchFailed):
    """The peer went away before the response was whole."""


class TimedOut(FetchFailed):
    """A deadline passed."""


class TooSlow(TimedOut):
    """The body arrived at less than the rate that a body must have."""


class ConnectTimedOut(TimedOut):
    """No address of the host took the connection in time; nothing was sent."""


class BadResponse(FetchFailed):
    """The bytes are not an HTTP/1.x response that can be framed without doubt."""


class BadEncoding(FetchFailed):
    """The body is not what its Content-Encoding says, or is encoded in a way we do not read."""


class BodyTooLarge(FetchFailed):
    """The body, decoded, is over its cap, or grows as only a bomb does."""


class BadRequest(FetchFailed):
    """The request itself cannot be put on the wire: a header name or value that HTTP lacks."""


# Tells a shortage of this process from a failure of its peer.
#
# The system reports some shortages as something else: a resolver that cannot open its files says
# that the name does not exist, TLS that cannot read the authorities' certificates says that the
# peer is not trusted. Before such a failure is blamed on the peer, `check_descriptors` is asked.


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
