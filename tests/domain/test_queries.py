"""Cursors continue the list that they were made for, and no other."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.domain import limits
from conveyor.domain.errors import InvalidArgument
from conveyor.domain.queries import make_cursor, read_cursor

SCOPE = "caller|job|run|all"


def sign(text: str) -> str:
    return hmac.new(b"secret", text.encode(), hashlib.sha256).hexdigest()[:24]


def is_refused(cursor: str, scope: str = SCOPE) -> bool:
    try:
        read_cursor(cursor, scope=scope, sign=sign)
    except InvalidArgument as refusal:
        return refusal.code == "invalid_cursor" and refusal.pointer == "/cursor"
    return False


@given(st.text(max_size=64).filter(bool).filter(lambda text: text.isprintable()))
def test_a_cursor_returns_the_position_it_was_made_from(position: str) -> None:
    cursor = make_cursor(position, scope=SCOPE, sign=sign)

    assert read_cursor(cursor, scope=SCOPE, sign=sign) == position
    assert cursor.isascii()


@given(st.text("0123456789abcdef", min_size=32, max_size=32), st.data())
def test_a_cursor_with_any_bit_flipped_is_refused(position: str, data: st.DataObject) -> None:
    cursor = make_cursor(position, scope=SCOPE, sign=sign)
    place = data.draw(st.integers(0, len(cursor) - 1))
    bit = data.draw(st.integers(0, 7))

    flipped = cursor[:place] + chr(ord(cursor[place]) ^ (1 << bit)) + cursor[place + 1 :]

    assert is_refused(flipped)


@given(st.text(max_size=80))
def test_text_that_this_service_did_not_sign_is_refused(text: str) -> None:
    assert is_refused(text)


@pytest.mark.parametrize(
    "scope", ["other|job|run|all", "caller|other|run|all", "caller|job|run|failed"]
)
def test_a_cursor_is_valid_for_its_own_list_only(scope: str) -> None:
    cursor = make_cursor("abc", scope=scope, sign=sign)

    assert not is_refused(cursor, scope)
    assert is_refused(cursor)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda cursor: cursor[:-1], id="cut short"),
        pytest.param(lambda cursor: cursor + "=", id="padded"),
        pytest.param(lambda cursor: cursor.replace(".", ".!", 1), id="with a stray character"),
        pytest.param(lambda cursor: cursor.replace("v1", "v2"), id="of another version"),
        pytest.param(lambda cursor: cursor + "x" * limits.CURSOR_CHARS_MAX, id="far too long"),
        pytest.param(lambda _: "v1..", id="without a position"),
    ],
)
def test_a_cursor_has_one_valid_spelling(change: object) -> None:
    assert callable(change)

    assert is_refused(change(make_cursor("abc", scope=SCOPE, sign=sign)))
