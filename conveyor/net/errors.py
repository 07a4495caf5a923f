"""What can go wrong with one fetch. No message holds a path, a query or a header value."""

from __future__ import annotations

from conveyor.domain.errors import ConveyorError

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
