"""PageText: shows a stored body as Markdown or as plain text, for a reader that pays by the word.

The page is hostile: it may nest a million elements or end in the middle of a tag. The parser keeps
no tree and no stack of elements, it reads each character once, and it reads no more than
PAGE_CHARS_MAX of them. What is left of an unfinished tag at the end of the page is dropped, as a
browser does: to parse it again as text would take quadratic time.
"""

from __future__ import annotations

import re
from enum import StrEnum
from html.parser import HTMLParser

from conveyor.domain.submit.charset import find_charset

#: Characters of a page that are read. Longer pages are mostly scripts, which come last.
PAGE_CHARS_MAX = 1_000_000
#: List levels that are indented. Deeper ones look like the deepest of these.
_LEVELS_MAX = 8

_SPACES = re.compile(r"\s+")
# What a reader can follow: no scripts, and no files within the link.
_HREF = re.compile(r"(?!\s*(?:javascript|data|#))[^\0]{1,2000}\Z", re.IGNORECASE)
_HIDDEN = frozenset({"script", "style", "template", "noscript", "svg", "iframe", "select"})
# Elements that stand alone, and elements that only begin a line.
_PARAGRAPH = re.compile(
    r"(address|article|aside|blockquote|details|dl|fieldset|figure|footer|form|h[1-6]|header|main"
    r"|nav|ol|p|pre|section|table|title|ul)\Z"
)
_LINE = re.compile(r"(br|dd|div|dt|figcaption|li|legend|option|summary|tr)\Z")
_MARKS = {"strong": "**", "b": "**", "em": "*", "i": "*", "code": "`"}
_BINARY = (b"%PDF", b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"PK\x03\x04", b"RIFF", b"\x1f\x8b")


class PageFormat(StrEnum):
    """How a body is shown."""

    MARKDOWN = "markdown"
    TEXT = "text"
    SOURCE = "source"


class NotText(Exception):
    """The body is an image, an archive or another file that is no text."""


def show_body(body: bytes, kind: PageFormat) -> str:
    """Returns a body as text. Raises NotText. A body that is no HTML is returned as it is."""
    text = _decode(body)
    if kind is PageFormat.SOURCE or not text[:1_000].lstrip("\ufeff \t\r\n").startswith("<"):
        return text
    page = _Page(with_markup=kind is PageFormat.MARKDOWN)
    # The last tag makes the parser hand over the text before it.
    page.feed(text[:PAGE_CHARS_MAX] + "<br>")
    return page.text()


def _decode(body: bytes) -> str:
    if body.startswith(_BINARY) or b"\0" in body[:4_096]:
        raise NotText(f"The body is no text. It has {len(body):,} bytes.")
    try:
        return body.decode()
    except UnicodeDecodeError:
        return body.decode(find_charset(body, "") or "cp1252", errors="replace")


class _Page(HTMLParser):
    """Writes the text of a page while it is parsed."""

    def __init__(self, *, with_markup: bool) -> None:
        super().__init__(convert_charrefs=True)
        self._with_markup = with_markup
        self._pieces: list[str] = []
        self._breaks = 0  # Line breaks before the next word.
        self._is_spaced = False  # Whether a space comes before the next word.
        self._hidden = ""
        self._hidden_depth = 0
        self._is_source = False
        self._counters: list[int | None] = []  # Of each open list: its last number.
        self._link = ""

    def text(self) -> str:
        return "".join(self._pieces).strip()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._hidden:
            self._hidden_depth += tag == self._hidden
            return
        if tag in _HIDDEN:
            self._hidden, self._hidden_depth = tag, 1
            return
        self._break_around(tag)
        if tag in {"ul", "ol"} and len(self._counters) < _LEVELS_MAX:
            self._counters.append(0 if tag == "ol" else None)
        elif tag == "li":
            self._begin_item()
        elif tag in {"td", "th"}:
            if not self._breaks:
                self._write(" | " if self._with_markup else "\t")
        elif tag == "pre":
            self._write("```\n" if self._with_markup else "")
            self._is_source = True
        elif self._with_markup:
            self._begin_markup(tag, dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        if self._hidden:
            self._hidden_depth -= tag == self._hidden
            if self._hidden_depth == 0:
                self._hidden = ""
            return
        if tag in {"ul", "ol"} and self._counters:
            self._counters.pop()
        if tag == "pre" and self._is_source:
            self._is_source = False
            self._pieces.append("\n```" if self._with_markup else "")
        elif tag == "a" and self._link:
            self._pieces.append(f"]({self._link})")
            self._link = ""
        elif self._with_markup and tag in _MARKS and not self._is_source:
            self._pieces.append(_MARKS[tag])
        self._break_around(tag)

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        if self._is_source:
            self._pieces.append(data)
            return
        words = _SPACES.sub(" ", data)
        self._is_spaced |= words.startswith(" ")
        if words := words.strip():
            self._write(words)
            self._is_spaced = data[-1].isspace()

    def _begin_markup(self, tag: str, attributes: dict[str, str | None]) -> None:
        if re.fullmatch(r"h[1-6]", tag):
            self._write("#" * int(tag[1]) + " ")
        elif tag == "title":
            self._write("# ")
        elif tag == "blockquote":
            self._write("> ")
        elif tag == "hr":
            self._breaks = 2
            self._write("---")
            self._breaks = 2
        elif tag == "img" and attributes.get("alt"):
            self._write(f"![{_SPACES.sub(' ', attributes['alt'] or '')}]")
        elif tag == "a" and not self._link and _HREF.match(attributes.get("href") or ""):
            self._link = _SPACES.sub("", attributes["href"] or "")
            self._write("[")
        elif tag in _MARKS and not self._is_source:
            self._write(_MARKS[tag])

    def _begin_item(self) -> None:
        indent = "  " * (len(self._counters) - 1)
        mark = "-"
        if self._counters and (number := self._counters[-1]) is not None:
            self._counters[-1] = number + 1
            mark = f"{number + 1}."
        self._write(f"{indent}{mark} ")

    def _break_around(self, tag: str) -> None:
        if _PARAGRAPH.match(tag) and not (tag in {"ul", "ol"} and self._counters):
            self._breaks = 2
        elif _LINE.match(tag):
            self._breaks = max(self._breaks, 1)

    def _write(self, words: str) -> None:
        if self._breaks:
            self._pieces.append("\n" * self._breaks if self._pieces else "")
        elif self._is_spaced:
            self._pieces.append(" ")
        self._pieces.append(words)
        self._breaks, self._is_spaced = 0, False
