"""Links: what a page, a page as Markdown, or a sitemap leads to (docs/crawls.md, Links).

A page may be hostile, so every reader takes time in proportion to the length of what it reads: it
stops at a comment, a script or a tag that never ends, as a browser does.
"""

from __future__ import annotations

import html
import re
import zlib
from collections.abc import Iterable, Iterator

import msgspec

from conveyor.domain.crawl.urls import LinkFilter, normal_form, resolve
from conveyor.domain.submit.charset import decode_page
from conveyor.domain.submit.target import BadUrl, Target, parse_url

# Further bytes of a page are not searched for links. Pages above this size are data, not text.
PAGE_BYTES_MAX = 8 * 1024 * 1024
# The sitemap protocol allows 50 MB; what is behind this is not read.
SITEMAP_BYTES_MAX = 50 * 1024 * 1024
# More links on one page are not followed. The sitemap protocol allows 50,000 locations.
LINKS_MAX = 50_000

_OPENING = re.compile(
    r"<(?:(!--)|(script|style|textarea|template|title)\b|(a|area|base|link)\b)", re.IGNORECASE
)
_ATTRIBUTES = re.compile(r"(?:[^>\"']++|\"[^\"]*+\"|'[^']*+')*>")
_ATTRIBUTE = re.compile(r"([^\s\"'>/=]++)\s*+=\s*+(?:\"([^\"]*+)\"|'([^']*+)'|([^\s\"'=<>`]++))")
_END_OF_RAW = {
    name: re.compile(rf"</{name}\b", re.IGNORECASE)
    for name in ("script", "style", "textarea", "template", "title")
}
_MARKDOWN_LINK = re.compile(r"(?<!!)\[[^\[\]]{0,1000}\]\(\s*<?([^()\s<>]{1,2048})")
_LOCATION = re.compile(r"<loc>\s*(?:<!\[CDATA\[\s*)?([^<\]\s]+)")
_SITEMAP_INDEX = re.compile(r"<sitemapindex\b")
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = 31


class PageText(msgspec.Struct, frozen=True):
    """The links as they are written on a page, and what the page says about its own URL."""

    links: tuple[str, ...]
    canonical: str | None = None
    base: str | None = None


class Reading(msgspec.Struct, frozen=True):
    """What a fetched page leads to, as normal forms, each once.

    `moved_to` is the URL of which the page is a duplicate: by redirect, or by its canonical link.
    Empty if that is not on the site.
    """

    links: tuple[str, ...] = ()
    sitemaps: tuple[str, ...] = ()
    moved_to: str | None = None


def read_page(
    url: str,
    body: bytes,
    content_type: str,
    final_url: str | None,
    link_filter: LinkFilter,
    *,
    is_markdown: bool,
    follows_canonical: bool,
) -> Reading:
    """Reads a page that was fetched under the normal form `url`."""
    base = parse_url(final_url or url)
    if isinstance(base, BadUrl):
        return Reading()
    if (final := normal_form(base)) != url:
        return Reading(moved_to=final if link_filter.follows(final) else "")
    text = decode_page(body[:PAGE_BYTES_MAX], content_type)
    if is_markdown:
        page = PageText(tuple(match[1] for match in _MARKDOWN_LINK.finditer(text)))
    elif "html" in content_type or not content_type:
        page = find_links(text)
    else:
        return Reading()
    if follows_canonical and page.canonical is not None:
        canonical = next(_normal_forms([page.canonical], base, link_filter), url)
        if canonical != url:
            return Reading(moved_to=canonical)
    base = (resolve(base, page.base) if page.base else None) or base
    forms = dict.fromkeys(_normal_forms(page.links, base, link_filter))
    forms.pop(url, None)
    return Reading(links=tuple(forms)[:LINKS_MAX])


def read_sitemap(url: str, body: bytes, link_filter: LinkFilter) -> Reading:
    """Reads a sitemap, an index of sitemaps or a list of URLs; each may be compressed."""
    base = parse_url(url)
    assert isinstance(base, Target)
    text = _inflate(body).decode(errors="replace")
    locations = [html.unescape(match[1]) for match in _LOCATION.finditer(text)]
    if not locations and "<" not in text[:1000]:
        locations = text.split()
    if _SITEMAP_INDEX.search(text):
        # A sitemap is often called .xml.gz, so the rule for files does not apply.
        children = (_form_of(resolve(base, location)) for location in locations[:LINKS_MAX])
        on_site = [child for child in children if child and link_filter.is_on_site(child)]
        return Reading(sitemaps=tuple(dict.fromkeys(on_site)))
    forms = dict.fromkeys(_normal_forms(locations[:LINKS_MAX], base, link_filter))
    return Reading(links=tuple(forms))


def find_links(text: str) -> PageText:
    """Returns the links of an HTML page, in its order."""
    links: list[str] = []
    canonical = base = None
    for name, attributes in _tags(text):
        href = attributes.get("href")
        if href is None:
            continue
        if name in {"a", "area"}:
            links.append(href)
        elif name == "base":
            base = base or href
        elif "canonical" in attributes.get("rel", "").lower().split():
            canonical = canonical or href
    return PageText(tuple(links), canonical, base)


def _tags(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    position = 0
    while (opening := _OPENING.search(text, position)) is not None:
        comment, raw, name = opening.groups()
        if comment:
            end = text.find("-->", opening.end())
            if end < 0:
                return
            position = end + len("-->")
            continue
        attributes = _ATTRIBUTES.match(text, opening.end())
        if attributes is None:
            return
        position = attributes.end()
        if raw:
            closing = _END_OF_RAW[raw.lower()].search(text, position)
            if closing is None:
                return
            position = closing.end()
            continue
        yield name.lower(), _attributes_in(attributes[0])


def _attributes_in(text: str) -> dict[str, str]:
    attributes: dict[str, str] = {}
    for match in _ATTRIBUTE.finditer(text):
        value = next(group for group in match.groups()[1:] if group is not None)
        attributes.setdefault(match[1].lower(), html.unescape(value).strip())
    return attributes


def _normal_forms(
    references: Iterable[str], base: Target, link_filter: LinkFilter
) -> Iterator[str]:
    for reference in references:
        form = _form_of(resolve(base, reference))
        if form is not None and link_filter.follows(form):
            yield form


def _form_of(target: Target | None) -> str | None:
    return None if target is None else normal_form(target)


def _inflate(body: bytes) -> bytes:
    if not body.startswith(_GZIP_MAGIC):
        return body[:SITEMAP_BYTES_MAX]
    try:
        return zlib.decompressobj(_GZIP_WINDOW).decompress(body, SITEMAP_BYTES_MAX)
    except zlib.error:
        return b""
