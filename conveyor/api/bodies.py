"""Request bodies: how large, how slow and of which kind they may be (SPEC 4.1)."""

from __future__ import annotations

import trio
from quart import Request

from conveyor.api.problems import TooLarge, TooSlow, UnsupportedMedia

BODY_TIMEOUT_S = 30.0
BYTES_PER_S_MIN = 64 * 1024


def require_json(request: Request) -> None:
    """Before a byte is read: only JSON, in UTF-8, as it is."""
    if request.mimetype != "application/json":
        raise UnsupportedMedia("Send the body as application/json.")
    charset = request.mimetype_params.get("charset", "utf-8").lower()
    if charset not in {"utf-8", "utf8"}:
        raise UnsupportedMedia("JSON is UTF-8; leave the charset out.")


def require_plain(request: Request) -> None:
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in {"", "identity"}:
        raise UnsupportedMedia("Send the body without a Content-Encoding.")


async def read_body(request: Request, *, bytes_max: int) -> bytes:
    """The whole body. A large one has longer to arrive; one that dawdles is cut off."""
    if request.content_length is not None and request.content_length > bytes_max:
        raise _too_large(bytes_max)
    body = bytearray()
    begun = trio.current_time()
    with trio.move_on_at(begun + BODY_TIMEOUT_S) as scope:
        async for piece in request.body:
            body += piece
            if len(body) > bytes_max:
                raise _too_large(bytes_max)
            scope.deadline = begun + BODY_TIMEOUT_S + len(body) / BYTES_PER_S_MIN
    if scope.cancelled_caught:
        raise TooSlow("The body did not arrive in time.")
    return bytes(body)


def _too_large(bytes_max: int) -> TooLarge:
    return TooLarge(f"The body may have at most {bytes_max} bytes.")
