"""The errors of one fetch. No message contains a path, a query or a header value."""

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
    sent, and the site is not the cause."""


class NoMemoryForBody(FetchFailed):
    """The other large bodies of this process needed its memory until the deadline. The request was
    sent, and the site is not the cause."""


class ForbiddenTarget(FetchFailed):
    """The policy forbids the target. No socket was opened."""


class NameNotResolved(FetchFailed):
    """The host has no address, or (`is_temporary`) the resolver could not answer."""

    def __init__(self, detail: str, *, is_temporary: bool = False) -> None:
        super().__init__(detail)
        self.is_temporary = is_temporary


class ConnectFailed(FetchFailed):
    """No address of the host accepted the connection."""


class TlsFailed(FetchFailed):
    """The TLS handshake failed. `is_untrusted`: the certificate was the reason."""

    def __init__(self, detail: str, *, is_untrusted: bool = False) -> None:
        super().__init__(detail)
        self.is_untrusted = is_untrusted


class ConnectionLost(FetchFailed):
    """The peer closed the connection before the response was complete."""


class TimedOut(FetchFailed):
    """A deadline passed."""


class TooSlow(TimedOut):
    """The body arrived more slowly than the minimum rate."""


class ConnectTimedOut(TimedOut):
    """No address of the host accepted the connection in time. No request was sent."""


class BadResponse(FetchFailed):
    """The bytes are not an HTTP/1.x response with unambiguous framing."""


class BadEncoding(FetchFailed):
    """The body does not match its Content-Encoding, or the encoding is not supported."""


class BodyTooLarge(FetchFailed):
    """The decoded body exceeds its limit, or grows by a factor that only a bomb has."""


class BadRedirect(FetchFailed):
    """A redirect leads nowhere, in a circle, or may not be followed with this request."""


class BadRequest(FetchFailed):
    """The request cannot be encoded: its method, a header or its body length is not allowed."""


# The functions below distinguish a shortage of this process from a failure of its peer.
#
# The system reports some shortages as other errors. A resolver that cannot open its files reports
# that the name does not exist. OpenSSL that cannot read the certificates of the authorities reports
# that the peer is not trusted. The client therefore calls `check_descriptors` before it attributes
# such an error to the peer.


DETAIL = "this worker is out of descriptors, memory, threads or ports"


def check_descriptors() -> None:
    """Raises OutOfResources when this process can open no descriptor."""
    try:
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()
    except OSError as error:
        if is_resource_shortage(error):
            raise OutOfResources(DETAIL) from error


def judge_connect(error: OSError, address: str, port: int) -> FetchFailed | None:
    """Returns OutOfResources if a shortage of this process made the connect to `address` fail,
    else None."""
    if error.errno == errno.EADDRNOTAVAIL:
        # Either all local ports are in use, or this machine has no address that can reach the
        # peer: a host without IPv6 reports this error for every IPv6 address.
        return OutOfResources(DETAIL) if _has_source_address(address, port) else None
    # A connect in progress reports EINPROGRESS. Linux reports EAGAIN when no port is free.
    is_short = error.errno == errno.EAGAIN or is_resource_shortage(error)
    return OutOfResources(DETAIL) if is_short else None


def _has_source_address(address: str, port: int) -> bool:
    """Whether this machine has a source address for the peer. A UDP connect sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, port))
    except OSError as error:
        return is_resource_shortage(error) and error.errno != errno.EADDRNOTAVAIL
    return True
