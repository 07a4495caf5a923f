"""The text of a page is decoded in the charset that the page states."""

from __future__ import annotations

import pytest

from conveyor.domain.submit.charset import decode_page, find_charset


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        ("Größe".encode("latin-1"), "text/html; charset=ISO-8859-1"),
        ("Größe".encode(), "text/html"),
        ("Größe".encode("utf-16"), "text/html"),
        (b'<meta charset="windows-1252">Gr\xf6\xdfe', "text/html"),
        ("Größe".encode(), "text/html; charset=base64"),
        ("Größe".encode(), "text/html; charset=no-such"),
        ("Größe".encode("utf-8-sig"), "text/html; charset=latin-1"),
    ],
)
def test_a_page_is_read_in_the_charset_that_it_states(body: bytes, content_type: str) -> None:
    assert decode_page(body, content_type).endswith("Größe")


@pytest.mark.parametrize("name", ["idna", "punycode", "undefined", "base64", "zlib", "no-such"])
def test_a_python_codec_that_is_no_charset_is_not_used(name: str) -> None:
    body = f"<meta charset={name}>".encode() + b"\xff"

    assert find_charset(body, "text/html") is None
    assert decode_page(body, "text/html").endswith("\ufffd")
