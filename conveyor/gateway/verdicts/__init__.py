"""Verdicts: tells block and challenge pages, consent walls, soft 404s and empty shells from content
(docs/content.md, Verdicts).

The rules are data, in `rules.toml`, in the order in which they are tried. Each has a verdict and
conditions that must all hold; a condition with a list holds if one of its entries does.

Every fetched page is judged, so this must cost little beside the fetch. Nearly all rules bound the
visible text. So a page is read until it shows more text than any rule allows, which an ordinary
page does within its first thousands of characters; then only the rules without a bound are tried.
Measured: 0.015 ms for a page of 20 KB and 0.05 ms for one of 60 KB, beside 0.23 ms for all else
that a page costs. Regular expressions over the whole text took 0.18 and 0.42 ms. A page with much
markup and hardly any text takes up to 2 ms, because its source is searched for many markers.

A rule must not mistake content for a block: pages that write about captchas, embed one in a form,
or show a cookie banner are content, and so is a film that is called Forbidden. So each rule names
what only such a page has, or says to its visitor, and bounds the visible text. When in doubt a page
is content: a caller can state conditions of his own.

Only pages are judged by what they contain. Downloads, parts of a page, and data with the type of a
page, such as JSON or a feed, are what the site sent for the URL.
"""

from __future__ import annotations

import html
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from functools import cache, cached_property
from importlib.resources import files

import msgspec

from conveyor.domain.model import FailureReason
from conveyor.domain.submit.charset import decode_page, looks_like_html
from conveyor.ports.gateway import Page

# What is read of a page. No rule is about larger pages.
READ_BYTES_MAX = 128 * 1024
# A page that shows more text than this is read no further. No rule has a larger bound.
_TEXT_CHARS_MAX = 4000
# Most pages show more text than that in their first bytes, so that the rest is not even decoded.
_FIRST_BYTES = 16 * 1024
# So much of it is read at a time.
_PIECE_CHARS = 6 * 1024
_TITLE_CHARS_MAX = 300
_UNKNOWN_TYPE = "application/octet-stream"
_HTML_TYPES = frozenset({"text/html", "application/xhtml+xml"})
# What begins like this is data, whatever its type says: JSON, a feed, a sitemap.
_DATA_STARTS = (b"{", b"[", b"<rss", b"<feed", b"<urlset", b"<sitemapindex", b"<rdf")
_XML_DECLARATION = re.compile(rb"<\?xml[^<>]{0,200}\?>\s*")
# Comments, and elements whose content is not shown.
_HIDDEN = re.compile(r"<(?:!--|(head|noscript|script|style|svg|template|title)(?=[\s>])[^<>]*>)")
_FIELD = re.compile(r"<(?:input|textarea|select)\b[^<>]*")
_IS_BUTTON = re.compile(r"type\s*=\s*[\"']?(?:hidden|submit|button|image)")
_IMAGE = re.compile(r"<(?:img|picture|video|audio|canvas|i?frame|embed|object)\b")
_LINK = re.compile(r"<a\s[^<>]*\bhref")
_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")
_SPACES = re.compile(r"\s+")
# What a document has that shows nothing at all.
_BARE = re.compile(
    r"(?:\s|</?(?:!doctype|html|head|body|meta|link|base|script|style|noscript|svg|template|title)\b[^<>]*>)*"
)
# What separates the parts of a title, such as the name of the page and that of the site.
_TITLE_PARTS = re.compile(r"\s[|\u2013\u2014\u00b7\u2022:»-]+\s|\s*[|»]\s*")
_TITLE_EDGES = " \t\n.\u2026!?¡¿:;,-\u2013\u2014()[]\"'\u2019"


class Verdict(StrEnum):
    """What a page is that is no content."""

    BLOCKED = "blocked"  #: The site refuses the visitor.
    CHALLENGE = "challenge"  #: The site wants proof that the visitor is a person or a browser.
    CONSENT = "consent"  #: The site shows nothing until the visitor agrees to something.
    SOFT_404 = "soft_404"  #: The page does not exist, although the status says that it does.
    SHELL = "shell"  #: The page has no content until its scripts have run.


class Meaning(msgspec.Struct, frozen=True):
    """What a verdict means for the task."""

    reason: FailureReason
    retryable: bool
    detail: str


MEANINGS: Mapping[Verdict, Meaning] = {
    Verdict.BLOCKED: Meaning(FailureReason.BLOCKED, True, "the site answered with a block page"),
    Verdict.CHALLENGE: Meaning(
        FailureReason.BLOCKED, True, "the site answered with a challenge instead of the page"
    ),
    Verdict.CONSENT: Meaning(
        FailureReason.BLOCKED, True, "the site answered with a consent wall instead of the page"
    ),
    Verdict.SOFT_404: Meaning(
        FailureReason.BAD_TARGET, False, "the site has no such page, although its status says so"
    ),
    # The same fetch would return the same shell.
    Verdict.SHELL: Meaning(
        FailureReason.OTHER,
        False,
        "the page has no content, or none until its scripts run (js_render)",
    ),
}


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A verdict and the conditions that must all hold for it. Texts are in lower case."""

    name: str
    verdict: Verdict
    status: tuple[int, ...] = ()
    headers: dict[str, str] = {}  #: One of them contains its text.
    url: tuple[str, ...] = ()  #: The final URL contains one of them.
    url_also: tuple[str, ...] = ()  #: The final URL contains one of them too.
    title: tuple[str, ...] = ()  #: The title, or a part of it, is one of them.
    markers: tuple[str, ...] = ()  #: The source contains one of them.
    also: tuple[str, ...] = ()  #: The source contains one of them too.
    text: tuple[str, ...] = ()  #: The visible text contains one of them.
    text_also: tuple[str, ...] = ()  #: The visible text or the title contains one of them too.
    either: tuple[str, ...] = ()  #: The source or the visible text contains one of them.
    words: frozenset[str] = frozenset()  #: The visible text has no other words, or none.
    text_chars_max: int | None = None
    bytes_max: int = READ_BYTES_MAX
    fields_max: int | None = None  #: Fields of forms that are not hidden.
    images_max: int | None = None
    links_max: int | None = None
    script_chars_max: int | None = None  #: Characters of scripts inside the page.
    is_bare: bool = False  #: No element is shown, not even one without text.
    is_rendered: bool = False  #: A browser has run the scripts of the page.

    def __post_init__(self) -> None:
        bound = self.text_chars_max
        is_bounded = bound is not None and bound <= _TEXT_CHARS_MAX
        counts = (self.fields_max, self.images_max, self.links_max, self.script_chars_max)
        texts = self.text or self.text_also or self.either or self.words
        needs_content = texts or any(count is not None for count in counts)
        assert not self.is_bare or bound == 0
        # Otherwise the rule would be tried on a page whose content was not read to its end.
        assert is_bounded or (bound is None and not needs_content)


class Finding(msgspec.Struct, frozen=True):
    """A verdict and the name of the rule that led to it."""

    verdict: Verdict
    rule: str


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lists: dict[str, tuple[str, ...]]
    rules: tuple[Rule, ...]


@cache
def load_rules() -> tuple[Rule, ...]:
    text = files(__package__).joinpath("rules.toml").read_bytes()
    document = msgspec.toml.decode(text, type=_Document)
    return tuple(_expand(rule, document.lists) for rule in document.rules)


def _expand(rule: Rule, lists: Mapping[str, tuple[str, ...]]) -> Rule:
    """Puts the lists in the place of their names."""

    def expand(texts: Iterable[str]) -> Iterator[str]:
        for text in texts:
            yield from lists[text[1:]] if text.startswith("*") else (text,)

    return msgspec.structs.replace(
        rule,
        title=tuple(expand(rule.title)),
        markers=tuple(expand(rule.markers)),
        text=tuple(expand(rule.text)),
        text_also=tuple(expand(rule.text_also)),
        words=frozenset(expand(rule.words)),
    )


@cache
def _unbounded_rules() -> tuple[Rule, ...]:
    """Returns the rules that may hold for a page with much text, or for one that is not read."""
    return tuple(rule for rule in load_rules() if rule.text_chars_max is None)


def judge(page: Page) -> Finding | None:
    """Returns the verdict on an answer that is no page, and None for content."""
    facts = PageFacts(page)
    for rule in load_rules() if facts.shows_little else _unbounded_rules():
        if _holds(rule, facts):
            return Finding(rule.verdict, rule.name)
    return None


def _holds(rule: Rule, facts: PageFacts) -> bool:
    page = facts.page
    if rule.status and page.status not in rule.status:
        return False
    if rule.is_rendered and not page.is_rendered:
        return False
    if rule.headers and not _has_header(page, rule.headers):
        return False
    for parts in (rule.url, rule.url_also):
        if parts and not any(part in facts.url for part in parts):
            return False
    if not (rule.title or rule.markers or rule.text or rule.text_chars_max is not None):
        return True
    return facts.is_html and len(page.body) <= rule.bytes_max and _source_holds(rule, facts)


def _has_header(page: Page, headers: Mapping[str, str]) -> bool:
    return not page.headers.keys().isdisjoint(headers) and any(
        text in page.headers.get(name, "").lower() for name, text in headers.items()
    )


def _source_holds(rule: Rule, facts: PageFacts) -> bool:
    """The conditions in the order of what they cost: what a page shows is short here, and its
    source may be long."""
    titles = facts.title_parts.intersection(rule.title)
    if rule.title and not titles:
        return False
    bounds = (
        (rule.text_chars_max, len(facts.content.text)),
        (rule.fields_max, facts.content.field_count),
        (rule.images_max, facts.content.image_count),
        (rule.links_max, facts.content.link_count),
        (rule.script_chars_max, facts.content.script_chars),
    )
    if any(bound is not None and actual > bound for bound, actual in bounds):
        return False
    if rule.is_bare and not facts.content.is_bare:
        return False
    if rule.words and not rule.words.issuperset(_WORD.findall(facts.content.text)):
        return False
    # A heading that repeats the title says no more than the title does.
    statement = _without(facts.content.text, facts.title_parts if rule.text_also else titles)
    if rule.text and not any(text in statement for text in rule.text):
        return False
    if rule.text_also and not any(text in facts.named_text for text in rule.text_also):
        return False
    for markers in (rule.markers, rule.also):
        if markers and not any(marker in facts.source for marker in markers):
            return False
    if not rule.either:
        return True
    source = _without(facts.source, titles)
    return any(text in statement or text in source for text in rule.either)


def _without(text: str, parts: Collection[str]) -> str:
    for part in parts:
        text = text.replace(part, "")
    return text


def _is_download(disposition: str) -> bool:
    return disposition.strip().lower().startswith("attachment")


class Content(msgspec.Struct, frozen=True):
    """What a reader of the page sees, and what its scripts take."""

    text: str
    field_count: int
    image_count: int
    link_count: int
    script_chars: int
    is_bare: bool = False


class PageFacts:
    """What rules ask of a page. A fact that not every page needs is computed when a rule first asks
    for it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.url = page.url.lower()
        self.is_html = self._is_html()

    def _is_html(self) -> bool:
        headers = self.page.headers
        if self.page.status == 206 or _is_download(headers.get("content-disposition", "")):
            return False
        start = self.page.body[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
        declared = headers.get("content-type", self.page.content_type)
        kind = declared.partition(";")[0].strip().lower()
        if kind not in _HTML_TYPES:
            # Some sites do not name a type. A browser shows such an answer as a page too.
            is_unnamed = not kind or ("content-type" not in headers and kind == _UNKNOWN_TYPE)
            return is_unnamed and looks_like_html(self.page.body)
        if start.startswith(b"<?xml"):
            start = _XML_DECLARATION.sub(b"", start, count=1)
        if not start:
            return self.page.is_rendered
        return not start.startswith(_DATA_STARTS)

    @property
    def shows_little(self) -> bool:
        """Whether the page shows so little text that rules with a bound may hold."""
        if not self.is_html or len(self.page.body) > READ_BYTES_MAX:
            return False
        if len(self.page.body) > _FIRST_BYTES:
            first = read_content(self._decode(_FIRST_BYTES))
            if len(first.text) > _TEXT_CHARS_MAX:
                return False
        return len(self.content.text) <= _TEXT_CHARS_MAX

    @cached_property
    def source(self) -> str:
        return self._decode(READ_BYTES_MAX)

    def _decode(self, bytes_max: int) -> str:
        return decode_page(self.page.body[:bytes_max], self.page.content_type).lower()

    @cached_property
    def title_parts(self) -> frozenset[str]:
        start = self.source.find("<title")
        begin = self.source.find(">", start) + 1
        if start < 0 or begin == 0:
            return frozenset()
        end = self.source.find("</title", begin)
        title = self.source[begin : min(end if end >= 0 else begin, begin + _TITLE_CHARS_MAX)]
        title = _SPACES.sub(" ", html.unescape(title)).replace("\u2019", "'")
        return frozenset(
            part.strip(_TITLE_EDGES) for part in (title, *_TITLE_PARTS.split(title))
        ) - {""}

    @cached_property
    def named_text(self) -> str:
        return "\n".join((*self.title_parts, self.content.text))

    @cached_property
    def content(self) -> Content:
        return read_content(self.source)


def read_content(source: str) -> Content:
    """Reads a page without a parser: rules only need to know roughly what is shown. Of a page that
    shows more than `_TEXT_CHARS_MAX` characters, the content has only the text until there.

    Every step takes time in proportion to the source, whatever it contains: each search begins
    where the last one ended, and no pattern can match across a `<`.
    """
    visible_parts: list[str] = []
    texts: list[str] = []
    text_chars = script_chars = 0
    for hidden_in, part in _split_hidden(source):
        if hidden_in is not None:
            script_chars += len(part) if hidden_in == "script" else 0
            continue
        visible_parts.append(part)
        text = _read_text(part)
        if text:
            texts.append(text)
        text_chars += len(text)
        if text_chars > _TEXT_CHARS_MAX:
            return Content(" ".join(texts), 0, 0, 0, script_chars)
    visible = " ".join(visible_parts)
    fields = sum(_IS_BUTTON.search(tag) is None for tag in _FIELD.findall(visible))
    images = len(_IMAGE.findall(visible))
    is_bare = not texts and _BARE.fullmatch(visible) is not None
    links = len(_LINK.findall(visible))
    return Content(" ".join(texts), fields, images, links, script_chars, is_bare)


def _split_hidden(source: str) -> Iterator[tuple[str | None, str]]:
    """Yields the parts of the source, each with the name of the element that hides it: None for
    what is shown, `!--` for a comment. Long parts come in pieces, so that the reader can stop."""
    position = 0
    while position < len(source):
        end = _end_of_piece(source, position)
        opening = _HIDDEN.search(source, position, end)
        if opening is None:
            yield None, source[position:end]
            position = end
            continue
        yield None, source[position : opening.start()]
        name = opening[1] or "!--"
        closing = source.find("-->" if name == "!--" else f"</{name}", opening.end())
        if closing < 0:
            return  # The rest of the page belongs to it.
        yield name, source[opening.end() : closing]
        position = closing + 3 if name == "!--" else closing


def _end_of_piece(source: str, start: int) -> int:
    """Returns where the piece that begins at `start` ends. No tag crosses that."""
    end = start + _PIECE_CHARS
    if end >= len(source):
        return len(source)
    last_tag = source.rfind("<", start, end)
    if last_tag < 0 or source.find(">", last_tag, end) >= 0:
        return end
    next_tag = source.find("<", end)
    return len(source) if next_tag < 0 else next_tag


def _read_text(visible: str) -> str:
    """Returns the text between tags, with single spaces."""
    before, *tags = visible.split("<")
    # A list and not a generator: this is most of what a verdict costs.
    text = " ".join([before, *[tag.partition(">")[2] for tag in tags]])
    return " ".join(html.unescape(text).split()).replace("\u2019", "'")
