"""The text of a page is decoded in the charset that the page states."""

from __future__ import annotations

import pytest

from conveyor.domain.submit.charset import decode_page, find_charset, looks_like_html


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


@pytest.mark.parametrize(
    "body",
    [
        b"<!doctype html><title>x</title>",
        b"\xef\xbb\xbf\r\n <HTML lang=en>",
        b"<!-- one --> <!-- <b> --><!DOCTYPE\nHTML>",
        b'<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml">',
        b"<head><title>x</title></head>",
    ],
)
def test_a_body_that_begins_like_html_is_recognised(body: bytes) -> None:
    assert looks_like_html(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"page",
        b'{"html": "<html>"}',
        b"<header>",
        b"<!-- <html>",
        b"<?xml version='1.0'?><urlset>",
        b"text <html>",
        b"<!-- -->" * 10_000 + b"<html>",
        b"<!--" * 10_000,
        b"\xff\xd8\xff\xe0",
    ],
)
def test_another_body_is_not_recognised_as_html(body: bytes) -> None:
    assert not looks_like_html(body)
