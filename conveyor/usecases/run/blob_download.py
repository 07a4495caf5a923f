"""Downloads of stored bodies: a missing or damaged body is never delivered as a whole one.

A short body is read and checked before the response begins. A longer one is checked while it is
sent, and its last piece is withheld until its digest is known: a client gets too few bytes instead
of wrong ones.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import AsyncGenerator, Callable

from conveyor.domain.errors import NotFound, ResultDamaged
from conveyor.domain.ids import CallerId
from conveyor.ports.errors import BlobMissing, StorageDamaged
from conveyor.usecases.context import Context

# Bodies up to this size are read completely before the response begins, so that damage becomes an
# error response. Most pages are smaller. A larger limit costs memory and delay for each download.
CHECKED_BYTES_MAX = 1024 * 1024

_DAMAGED = "The stored bytes are not those that were fetched; run the task again."


async def whole_body(
    env: Context, key: str, *, size_bytes: int, sha256: str, absent: str
) -> AsyncGenerator[bytes, None]:
    """Returns the body, checked against its length and digest. Raises NotFound if there is none.
    Raises ResultDamaged, at once or at the end of the stream, if it differs."""
    body = await open_stream(env, key, absent=absent)
    pieces = _checked(body, size_bytes, sha256)
    if size_bytes > CHECKED_BYTES_MAX:
        return pieces
    return _single(b"".join([piece async for piece in pieces]))


async def part_of_body(
    env: Context, key: str, *, start: int, end: int, absent: str
) -> AsyncGenerator[bytes, None]:
    """Returns the bytes from `start` to before `end`. Raises ResultDamaged at the end if there are
    fewer."""
    return _cut(await open_stream(env, key, start=start, absent=absent), end - start)


async def open_stream(
    env: Context, key: str, *, start: int = 0, absent: str
) -> AsyncGenerator[bytes, None]:
    """Opens the body at byte `start` and reads its first piece. Raises NotFound if there is
    none."""
    pieces = env.blobs.open(key, start=start)
    try:
        # Before the response begins, so that a missing blob is a 404 instead of a broken response.
        first = await anext(pieces, b"")
    except BlobMissing:
        raise NotFound(absent) from None
    except StorageDamaged:
        raise ResultDamaged(_DAMAGED) from None
    return _with_first(first, pieces)


async def _with_first(
    first: bytes, rest: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    try:
        yield first
        async for piece in rest:
            yield piece
    except StorageDamaged:
        raise ResultDamaged(_DAMAGED) from None
    finally:
        # Closes the engine's file or connection, also if the client disconnects in the middle.
        await rest.aclose()


async def _checked(
    pieces: AsyncGenerator[bytes, None], size_bytes: int, sha256: str
) -> AsyncGenerator[bytes, None]:
    digest, seen_bytes, held = hashlib.sha256(), 0, b""
    try:
        async for piece in pieces:
            digest.update(piece)
            seen_bytes += len(piece)
            if held:
                yield held
            held = piece
            # Too long is damaged already; do not read the rest.
            if seen_bytes > size_bytes:
                break
    finally:
        await pieces.aclose()
    if seen_bytes != size_bytes or digest.hexdigest() != sha256:
        raise ResultDamaged(_DAMAGED)
    yield held


async def _cut(pieces: AsyncGenerator[bytes, None], size_bytes: int) -> AsyncGenerator[bytes, None]:
    try:
        async for piece in pieces:
            yield piece[:size_bytes]
            size_bytes -= len(piece)
            if size_bytes <= 0:
                return
    finally:
        await pieces.aclose()
    if size_bytes > 0:
        raise ResultDamaged(_DAMAGED)


async def _single(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body


# Links: tokens that make one URL work without an API key, for a limited time (docs/api.md,
# Results).


LetsIn = Callable[[CallerId], bool]
"""Returns whether the key of a caller is accepted now: links end with the key of their caller."""


def let_all_in(caller: CallerId) -> bool:
    return True


def make_token(env: Context, what: str, *, purpose: str, until: float) -> str:
    return f"{int(until)}.{_signature(env, what, purpose, int(until))}"


def check_token(env: Context, token: str, what: str, *, purpose: str, absent: str) -> None:
    """Raises NotFound for any token that was not made for this purpose and object, and for an
    expired one."""
    text, _, signature = token.partition(".")
    # A bounded length, because the text comes from the client and `int` of a long text is slow.
    expires = int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0
    # Accept only the canonical spelling: with leading zeros one link would have many URLs.
    is_ours = text == str(expires)
    expected = _signature(env, what, purpose, expires)
    if not is_ours or not signature.isascii() or not hmac.compare_digest(expected, signature):
        raise NotFound(absent)
    # After the signature check, so that only a genuine link is reported as expired.
    if expires < env.now():
        raise NotFound("The link has expired; ask again for a new one.")


def _signature(env: Context, what: str, purpose: str, expires: int) -> str:
    return env.secret_box.sign(f"{what}/{expires}", purpose=purpose)
