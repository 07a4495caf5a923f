"""Stored bodies on their way out: what is missing or damaged never looks like a whole body.

A short body is read and checked before anything is said about it. A longer one is checked as it
goes, and its last piece is held back until its digest is known: whoever reads it sees too few bytes
rather than wrong ones.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import AsyncGenerator, Callable

from conveyor.domain.errors import NotFound, ResultDamaged
from conveyor.domain.ids import CallerId
from conveyor.ports.errors import BlobMissing, StorageDamaged
from conveyor.usecases.context import Context

# Read as a whole before it is promised: as much as most pages have, and a moment's work.
CHECKED_BYTES_MAX = 1024 * 1024

_DAMAGED = "The stored bytes are not those that were fetched; run the task again."


async def whole_body(
    env: Context, key: str, *, size_bytes: int, sha256: str, absent: str
) -> AsyncGenerator[bytes, None]:
    """The body, checked against its length and digest; NotFound where there is none, and
    ResultDamaged, at once or at the end, where it is another."""
    body = await open_stream(env, key, absent=absent)
    pieces = _checked(body, size_bytes, sha256)
    if size_bytes > CHECKED_BYTES_MAX:
        return pieces
    return _single(b"".join([piece async for piece in pieces]))


async def part_of_body(
    env: Context, key: str, *, start: int, end: int, absent: str
) -> AsyncGenerator[bytes, None]:
    """The bytes from `start` to before `end`; ResultDamaged at the end where there are fewer."""
    return _cut(await open_stream(env, key, start=start, absent=absent), end - start)


async def open_stream(
    env: Context, key: str, *, start: int = 0, absent: str
) -> AsyncGenerator[bytes, None]:
    """The body from byte `start`, its first piece in hand; NotFound where there is none."""
    pieces = env.blobs.open(key, start=start)
    try:
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


# Links: tokens that make one address work without a key, for a while (docs/api.md, Results).


LetsIn = Callable[[CallerId], bool]
"""Whether the key of a caller would be let in now: its links end with it."""


def let_all_in(caller: CallerId) -> bool:
    return True


def make_token(env: Context, what: str, *, purpose: str, until: float) -> str:
    return f"{int(until)}.{_signature(env, what, purpose, int(until))}"


def check_token(env: Context, token: str, what: str, *, purpose: str, absent: str) -> None:
    """NotFound for any token that we did not make for this, and once its time is over."""
    text, _, signature = token.partition(".")
    expires = int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0
    # Only as we write it: leading zeros would give one link many spellings.
    is_ours = text == str(expires)
    expected = _signature(env, what, purpose, expires)
    if not is_ours or not signature.isascii() or not hmac.compare_digest(expected, signature):
        raise NotFound(absent)
    if expires < env.now():
        raise NotFound("The link has expired; ask again for a new one.")


def _signature(env: Context, what: str, purpose: str, expires: int) -> str:
    return env.secret_box.sign(f"{what}/{expires}", purpose=purpose)
