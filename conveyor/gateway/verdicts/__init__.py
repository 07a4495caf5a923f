"""Verdicts: tells block and challenge pages, consent walls, soft 404s and empty shells from content
(docs/content.md, Verdicts).

The rules are data, in `rules.toml`, in the order in which they are tried. Each has a verdict and
conditions that must all hold; a condition with a list holds if one of its entries does. Rules bound
the visible text, so an ordinary page costs the reading of its text and hardly more: measured, one
millisecond for a page of 60 KB.

A rule must not mistake content for a block: pages that write about captchas, embed one in a form,
or show a cookie banner are content. So each rule names what only such a page has, or bounds the
visible text. When in doubt a page is content: a caller can state conditions of his own.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from enum import StrEnum
from functools import cache, cached_property
from importlib.resources import files

import msgspec

from conveyor.domain.model import FailureReason
from conveyor.domain.submit.conditions import decode_page
from conveyor.ports.gateway import Page

# What is read of a page. No rule is about larger pages.
READ_BYTES_MAX = 128 * 1024
# A page whose first characters show more text than any rule allows is read no further.
_FIRST_CHARS = 24 * 1024
_TEXT_CHARS_MAX = 4000
_TITLE_CHARS_MAX = 300
_HTML_TYPES = ("text/html", "application/xhtml+xml", "application/octet-stream", "text/plain")
# Comments, and elements whose content is not shown.
_HIDDEN = re.compile(r"<(?:!--|(head|noscript|script|style|svg|template)(?=[\s>])[^<>]*>)")
_TAG = re.compile(r"<[^<>]*>?")
_FIELD = re.compile(r"<(?:input|textarea|select)\b[^<>]*")
_IS_BUTTON = re.compile(r"type\s*=\s*[\"']?(?:hidden|submit|button|image)")
_IMAGE = re.compile(r"<(?:img|picture|video|canvas)\b")
_SPACES = re.compile(r"\s+")
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
        FailureReason.OTHER, False, "the page is empty until its scripts run: it needs js_render"
    ),
}


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A verdict and the conditions that must all hold for it. Texts are in lower case."""

    name: str
    verdict: Verdict
    status: tuple[int, ...] = ()
    headers: dict[str, str] = {}  #: One of them contains its text.
    url: tuple[str, ...] = ()  #: The final URL contains one of them.
    title: tuple[str, ...] = ()  #: The title, or a part of it, is one of them.
    markers: tuple[str, ...] = ()  #: The source contains one of them.
    also: tuple[str, ...] = ()  #: The source contains one of them too.
    text: tuple[str, ...] = ()  #: The visible text contains one of them.
    text_chars_max: int | None = None
    bytes_max: int = READ_BYTES_MAX
    fields_max: int | None = None  #: Fields of forms that are not hidden.
    images_max: int | None = None
    script_chars_max: int | None = None  #: Characters of scripts inside the page.


class Finding(msgspec.Struct, frozen=True):
    """A verdict and the name of the rule that led to it."""

    verdict: Verdict
    rule: str


@cache
def load_rules() -> tuple[Rule, ...]:
    class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        rules: tuple[Rule, ...]

    text = files(__package__).joinpath("rules.toml").read_bytes()
    return msgspec.toml.decode(text, type=Document).rules


def judge(page: Page) -> Finding | None:
    """Returns the verdict on an answer that is no page, and None for content."""
    facts = PageFacts(page)
    for rule in load_rules():
        if _holds(rule, facts):
            return Finding(rule.verdict, rule.name)
    return None


def _holds(rule: Rule, facts: PageFacts) -> bool:
    page = facts.page
    if rule.status and page.status not in rule.status:
        return False
    if rule.headers and not any(
        text in page.headers.get(name, "").lower() for name, text in rule.headers.items()
    ):
        return False
    if rule.url and not any(part in page.url.lower() for part in rule.url):
        return False
    if not (rule.title or rule.markers or rule.text or rule.text_chars_max is not None):
        return True
    return facts.is_html and len(page.body) <= rule.bytes_max and _source_holds(rule, facts)


def _source_holds(rule: Rule, facts: PageFacts) -> bool:
    if rule.title and facts.title_parts.isdisjoint(rule.title):
        return False
    # Before the markers: most pages have more text than any rule allows, so most rules end here.
    bounds = (
        (rule.text_chars_max, len(facts.content.text)),
        (rule.fields_max, facts.content.field_count),
        (rule.images_max, facts.content.image_count),
        (rule.script_chars_max, facts.content.script_chars),
    )
    if any(bound is not None and actual > bound for bound, actual in bounds):
        return False
    for markers in (rule.markers, rule.also):
        if markers and not any(marker in facts.source for marker in markers):
            return False
    return not rule.text or any(text in facts.content.text for text in rule.text)


class Content(msgspec.Struct, frozen=True):
    """What a reader of the page sees, and what its scripts take."""

    text: str
    field_count: int
    image_count: int
    script_chars: int


class PageFacts:
    """What rules ask of a page. Each fact is computed when a rule first asks for it."""

    def __init__(self, page: Page) -> None:
        self.page = page

    @cached_property
    def is_html(self) -> bool:
        kind = self.page.content_type.partition(";")[0].strip().lower()
        if kind in {"text/html", "application/xhtml+xml"}:
            return bool(self.page.body)
        start = self.page.body[:512].lstrip().lower()
        return kind in _HTML_TYPES and start.startswith((b"<!doctype html", b"<html", b"<head"))

    @cached_property
    def source(self) -> str:
        return decode_page(self.page.body[:READ_BYTES_MAX], self.page.content_type).lower()

    @cached_property
    def title_parts(self) -> frozenset[str]:
        start = self.source.find("<title")
        begin = self.source.find(">", start) + 1
        if start < 0 or begin == 0:
            return frozenset()
        end = self.source.find("</title", begin)
        title = self.source[begin : min(end if end >= 0 else begin, begin + _TITLE_CHARS_MAX)]
        title = _SPACES.sub(" ", html.unescape(title))
        return frozenset(
            part.strip(_TITLE_EDGES) for part in (title, *_TITLE_PARTS.split(title))
        ) - {""}

    @cached_property
    def content(self) -> Content:
        return read_content(self.source)


def read_content(source: str) -> Content:
    """Reads a page without a parser: rules only need to know roughly what is shown.

    Every step takes time in proportion to the source, whatever it contains: each search begins
    where the last one ended, and no pattern can match across a `<`.
    """
    visible, script_chars = _split_hidden(source)
    start = _read_text(visible[:_FIRST_CHARS])
    if len(start) > _TEXT_CHARS_MAX:
        return Content(start, 0, 0, script_chars)
    fields = sum(_IS_BUTTON.search(tag) is None for tag in _FIELD.findall(visible))
    images = len(_IMAGE.findall(visible))
    return Content(_read_text(visible), fields, images, script_chars)


def _read_text(visible: str) -> str:
    text = _SPACES.sub(" ", html.unescape(_TAG.sub(" ", visible))).strip()
    return text.replace("\u2019", "'")


def _split_hidden(source: str) -> tuple[str, int]:
    """Returns the source without comments and elements that are not shown, and the characters of
    its scripts."""
    visible: list[str] = []
    script_chars = position = 0
    while (opening := _HIDDEN.search(source, position)) is not None:
        visible.append(source[position : opening.start()])
        name = opening[1]
        end = source.find("-->" if name is None else f"</{name}", opening.end())
        if end < 0:
            return " ".join(visible), script_chars  # The rest of the page belongs to it.
        script_chars += end - opening.end() if name == "script" else 0
        position = end + 3 if name is None else end
    visible.append(source[position:])
    return " ".join(visible), script_chars
