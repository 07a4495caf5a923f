"""What an agent reads of a page, and what a hostile page can do to the reader."""

from __future__ import annotations

import pytest

from conveyor.cli.mcp.page_text import PAGE_CHARS_MAX, NotText, PageFormat, show_body

PAGE = b"""<!doctype html><html><head><title>A  page</title><style>p {}</style>
<script>if (a < b) { alert("no") }</script></head><body>
<nav><ul><li><a href="/a">Home</a></li><li>Two<ul><li>deep</li></ul></li></ul></nav>
<h2>Hello <b>big</b> world</h2><p>One
two <em>three</em>.<br>Four &amp; <a href="javascript:x()">five</a> <img src=x alt="a  cat"></p>
<ol><li>x<li>y</ol><table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table>
<pre>code
  here</pre><div>last</div>"""


def test_a_page_becomes_markdown() -> None:
    assert show_body(PAGE, PageFormat.MARKDOWN) == (
        "# A page\n\n- [Home](/a)\n- Two\n  - deep\n\n## Hello **big** world\n\n"
        "One two *three*.\nFour & five ![a cat]\n\n1. x\n2. y\n\na | b\n1 | 2\n\n"
        "```\ncode\n  here\n```\n\nlast"
    )


def test_a_page_becomes_plain_text() -> None:
    assert show_body(PAGE, PageFormat.TEXT) == (
        "A page\n\n- Home\n- Two\n  - deep\n\nHello big world\n\nOne two three.\nFour & five\n\n"
        "1. x\n2. y\n\na\tb\n1\t2\n\ncode\n  here\n\nlast"
    )


def test_the_source_of_a_page_is_what_was_fetched() -> None:
    assert show_body(PAGE, PageFormat.SOURCE) == PAGE.decode()


@pytest.mark.parametrize("body", [b'{"a": "<b>"}', b"# Already *Markdown*\n", b""])
def test_a_body_that_is_no_html_stays_as_it_is(body: bytes) -> None:
    assert show_body(body, PageFormat.MARKDOWN) == body.decode()


def test_a_page_is_decoded_as_it_declares() -> None:
    declared = '<meta charset="iso-8859-2"><p>Łódź'.encode("iso-8859-2")
    undeclared = "<p>café".encode("cp1252")
    unknown = b'<meta charset="nonsense"><p>caf\xe9'

    assert show_body(declared, PageFormat.TEXT) == "Łódź"
    assert show_body(undeclared, PageFormat.TEXT) == "café"
    assert show_body(unknown, PageFormat.TEXT) == "café"


@pytest.mark.parametrize("body", [b"\x89PNG\r\n", b"%PDF-1.7", b"PK\x03\x04", b"<p>\0</p>"])
def test_a_body_that_is_no_text_is_refused(body: bytes) -> None:
    with pytest.raises(NotText):
        show_body(body, PageFormat.MARKDOWN)


@pytest.mark.parametrize(
    "pattern",
    [b"<div>", b"<ul><li>", b"<a ", b"<!--", b"<![CDATA[", b"</", b'<a b="', b"<?", b"&#x", b"<"],
)
def test_a_hostile_page_is_read_in_one_pass(pattern: bytes) -> None:
    """A quadratic reader would need hours for these."""
    page = b"<p>before</p>" + pattern * (300_000 // len(pattern))

    assert show_body(page, PageFormat.MARKDOWN).startswith("before")


def test_what_lies_beyond_the_limit_is_not_read() -> None:
    page = b"<p>" + b"a" * PAGE_CHARS_MAX + b"end"

    assert len(show_body(page, PageFormat.TEXT)) == PAGE_CHARS_MAX - len("<p>")
