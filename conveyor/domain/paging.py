"""Cursors: signed, bound to what they were made for; one last id is a whole position
(docs/api.md, Results)."""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Callable

from conveyor.domain import limits
from conveyor.domain.errors import InvalidArgument

Sign = Callable[[str], str]


def make_cursor(position: str, *, scope: str, sign: Sign) -> str:
    """A cursor for `position` that is good for `scope` only."""
    signature = sign(f"{scope}\n{position}")
    packed = base64.urlsafe_b64encode(position.encode()).decode().rstrip("=")
    return f"v1.{packed}.{signature}"


def read_cursor(cursor: str, *, scope: str, sign: Sign) -> str:
    """The position in a cursor; InvalidArgument for anything that was not made here for `scope`."""
    if len(cursor) > limits.CURSOR_CHARS_MAX or not cursor.isascii():
        raise _invalid()
    version, _, rest = cursor.partition(".")
    packed, _, signature = rest.partition(".")
    if version != "v1" or not packed:
        raise _invalid()
    try:
        position = base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise _invalid() from None
    expected = sign(f"{scope}\n{position}")
    same_text = make_cursor(position, scope=scope, sign=lambda _: signature) == cursor
    if not same_text or not hmac.compare_digest(expected, signature):
        raise _invalid()
    return position


def _invalid() -> InvalidArgument:
    return InvalidArgument(
        "The cursor is not one that this list answered with; start again without it.",
        pointer="/cursor",
        code="invalid_cursor",
    )
