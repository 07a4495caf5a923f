"""Makes another document of a page: `css_extractor`, `autoparse`, `outputs` and `response_type`
(docs/content.md, Extraction).

These functions compute for as long as a page makes them, and need memory in proportion to it, so
they run in the processes of `pool`. They import the packages of the extra `gateway` when they first
need them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urljoin

import msgspec

from conveyor.domain.errors import ConveyorError
from conveyor.domain.submit.charset import decode_page, looks_like_html
from conveyor.domain.submit.scraper_params import (
    find_extracting,
    read_extractor,
    split_outputs,
)

_LITERAL = re.compile(r"\"[^\"]*\"|'[^']*'")
# A prefix or a variable of XPath, which fails only where it is evaluated, perhaps on few pages.
_UNDEFINED = re.compile(r"\$|[A-Za-z_][\w.-]*:(?=[A-Za-z_*])")
_ATTRIBUTE = re.compile(r"(?:^|\s|(?<=[\w\])*]))@([A-Za-z_][\w:.-]*)\s*\Z")
_SPACES = re.compile(r"\s+")
_EMAIL = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._%+-]{0,63}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,5}"
)
_HASHTAG = re.compile(r"(?<![\w&/#])#[^\W\d_]\w{1,60}")
_PHONE = re.compile(r"(?<![\w.])\+?\(?\d[\d() .\-/]{5,20}\d(?!\w)")
_HTML_TYPES = frozenset(
    {"text/html", "application/xhtml+xml", "application/xml", "text/xml", "text/plain"}
)
_DROPPED = ("script", "style", "noscript", "template", "svg")
# The parser stops at 2048 elements inside each other.
_DEPTH_MAX = 1500


class NotExtracted(ConveyorError):
    """The page has no such form. `code` is that of the task's problem."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


class Source(msgspec.Struct, frozen=True):
    """A page, the parameters that say what to make of it, and the most bytes of the result."""

    body: bytes
    content_type: str
    url: str
    params: dict[str, str]
    bytes_max: int


class Document(msgspec.Struct, frozen=True):
    """What the parameters asked for."""

    content_type: str
    body: bytes


def make_document(source: Source) -> Document:
    """Raises NotExtracted."""
    kind = source.content_type.partition(";")[0].strip().lower()
    if kind not in _HTML_TYPES and not looks_like_html(source.body):
        raise NotExtracted("not_html", "the page is no HTML, so nothing can be extracted from it")
    text = decode_page(source.body, source.content_type).replace("\x00", "")
    params = source.params
    # A line has one of these parameters: the submit refuses two.
    extracting = find_extracting(params)
    if "response_type" in extracting:
        is_markdown = params["response_type"] == "markdown"
        converted = (to_markdown if is_markdown else to_plaintext)(text)
        content_type = "text/markdown" if is_markdown else "text/plain"
        return _bounded(
            f"{content_type}; charset=utf-8", converted.encode(errors="replace"), source
        )
    data: object
    if "css_extractor" in extracting:
        _check_selectors(params["css_extractor"])
        data = extract_selected(text, read_extractor(params["css_extractor"]), source.bytes_max)
    elif "autoparse" in extracting:
        data = read_structured_data(text, source.url)
    else:
        data = read_outputs(text, source.url, split_outputs(params.get("outputs", "")))
    return _bounded("application/json", msgspec.json.encode(data), source)


def _bounded(content_type: str, body: bytes, source: Source) -> Document:
    if len(body) > source.bytes_max:
        raise NotExtracted("too_large", f"the result has more than {source.bytes_max} bytes")
    return Document(content_type, body)


def parse(text: str) -> Any:
    """Parses a page, however broken it is. Its root is always an element."""
    from lxml import etree, html

    # Encoded again, because lxml refuses text that declares an encoding.
    parser = html.HTMLParser(encoding="utf-8", no_network=True, huge_tree=True)
    try:
        page = text.encode(errors="replace")
        return html.document_fromstring(page, parser=parser, ensure_head_body=True)
    except etree.ParserError:
        # There is no element at all.
        return html.document_fromstring("<html></html>", ensure_head_body=True)


# css_extractor


def _check_selectors(text: str) -> None:
    """The submit has checked them already, unless another gateway was configured then."""
    for selector in read_extractor(text).values():
        if (error := check_selector(selector)) is not None:
            raise NotExtracted("invalid_param_value", f"css_extractor: {error}")


def check_selector(selector: str) -> str | None:
    """Returns what is wrong with a selector, in a few words."""
    from cssselect import SelectorError
    from lxml.etree import XPathError

    try:
        # XPath finds unknown names only when it is used.
        _compile(selector)[0](parse(""))
    except (SelectorError, SyntaxError, XPathError, RecursionError) as error:
        return " ".join(str(error).split())[:100] or "it cannot be read"
    return None


def _compile(selector: str) -> tuple[Callable[[Any], Any], str | None]:
    """Compiles CSS, or XPath if it begins with a slash, a dot before one, or a parenthesis.

    CSS may end with `@name`: then the value is that attribute of what the CSS matches.
    """
    from lxml.cssselect import CSSSelector
    from lxml.etree import XPath

    selector = selector.strip()
    if selector.startswith(("/", "./", "(")):
        if _UNDEFINED.search(_LITERAL.sub("", selector)):
            raise SyntaxError("XPath has no prefixes and no variables here")
        return XPath(selector, smart_strings=False), None
    attribute = _ATTRIBUTE.search(selector)
    css = selector[: attribute.start()].strip() if attribute else selector
    if attribute is not None:
        css = css or f"[{attribute[1]}]"
    return CSSSelector(css, translator="html"), attribute[1].lower() if attribute else None


def extract_selected(
    text: str, selectors: Mapping[str, str], chars_max: int
) -> dict[str, str | list[str] | None]:
    """Returns for each name what its selector matches: text, or an attribute.

    One match is a string, several are a list, and none is null, as in the contract's JSON.
    """
    root = parse(text)
    char_count = 0
    data: dict[str, str | list[str] | None] = {}
    for name, selector in selectors.items():
        values = []
        for value in _select(root, selector):
            char_count += len(value)
            if char_count > chars_max:
                raise NotExtracted("too_large", f"the result has more than {chars_max} bytes")
            values.append(value)
        data[name] = values if len(values) > 1 else (values[0] if values else None)
    return data


def _select(root: Any, selector: str) -> Iterator[str]:
    from lxml.etree import XPathError

    select, attribute = _compile(selector)
    try:
        matches = select(root)
    except XPathError as error:
        raise NotExtracted("invalid_param_value", f"css_extractor: {error}") from None
    for match in matches if isinstance(matches, list) else [matches]:
        if not hasattr(match, "text_content"):
            yield _squeeze(_scalar(match))  # XPath selects attributes, texts and numbers too.
        elif attribute is None:
            yield _squeeze(match.text_content())
        elif (value := match.get(attribute)) is not None:
            yield value


def _scalar(value: object) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _squeeze(text: str) -> str:
    return _SPACES.sub(" ", text).strip()


# autoparse


def read_structured_data(text: str, url: str) -> dict[str, object]:
    """Returns what the page states about itself: `json_ld`, `microdata`, `opengraph` and
    `metadata`. What a page does not have is missing."""
    from extruct.jsonld import JsonLdExtractor
    from extruct.opengraph import OpenGraphExtractor
    from extruct.w3cmicrodata import MicrodataExtractor

    root = parse(text)
    data: dict[str, object] = {"title": _title(root), "metadata": _metadata(root)}
    readers: tuple[tuple[str, Callable[[], object]], ...] = (
        ("json_ld", lambda: _json_ld(root, JsonLdExtractor())),
        ("microdata", lambda: MicrodataExtractor().extract_items(root, url)),
        ("opengraph", lambda: _opengraph(OpenGraphExtractor().extract_items(root, url))),
    )
    for name, read in readers:
        data[name] = read()
    return {name: value for name, value in data.items() if value}


def _json_ld(root: Any, extractor: Any) -> list[object]:
    """A page with one script that is no JSON keeps the others."""
    items: list[object] = []
    for script in root.xpath('//script[contains(@type, "ld+json")]'):
        try:
            items.extend(extractor.extract_items(script))
        except ValueError:
            continue
    return items


def _opengraph(items: list[Any]) -> dict[str, object]:
    """Properties by name; one that is stated several times is a list."""
    data: dict[str, Any] = {}
    for name, value in (pair for item in items for pair in item.get("properties", ())):
        if name not in data:
            data[name] = value
        elif isinstance(data[name], list):
            data[name].append(value)
        else:
            data[name] = [data[name], value]
    return data


def _title(root: Any) -> str:
    return _squeeze(root.findtext(".//title") or "")


def _metadata(root: Any) -> dict[str, str]:
    return {
        name: _squeeze(element.get("content", ""))
        for element in root.iter("meta")
        if (name := element.get("name") or element.get("property"))
    }


# outputs


def read_outputs(text: str, url: str, names: list[str]) -> dict[str, object]:
    """Returns the kinds of data with these names."""
    root = parse(text)
    base = urljoin(url, (root.xpath("string(//base/@href)") or "").strip())
    return {name: _OUTPUTS[name](root, base) for name in names}


def _visible_text(root: Any) -> str:
    pieces: list[str] = []
    hidden = 0
    from lxml.etree import iterwalk

    for event, element in iterwalk(root, events=("start", "end")):
        is_hidden = element.tag in _DROPPED
        if event == "start":
            hidden += is_hidden
            if not hidden and element.text:
                pieces.append(element.text)
        else:
            hidden -= is_hidden
            if not hidden and element.tail:
                pieces.append(element.tail)
    return "\n".join(pieces)


def _unique(values: Iterator[str]) -> list[str]:
    return list(dict.fromkeys(value for value in values if value))


def _absolute(root: Any, path: str, base: str) -> list[str]:
    return _unique(_join(base, value.strip()) for value in root.xpath(path))


def _join(base: str, value: str) -> str:
    if not value or value.startswith(("#", "javascript:", "data:", "mailto:", "tel:")):
        return ""
    try:
        return urljoin(base, value)
    except ValueError:
        return ""


def _emails(root: Any, _base: str) -> list[str]:
    links = (
        href[7:].partition("?")[0] for href in root.xpath("//a/@href[starts-with(., 'mailto:')]")
    )
    addresses = [*links, *_EMAIL.findall(_visible_text(root))]
    return _unique(email.strip(".").lower() for email in addresses if "@" in email)


def _phone_numbers(root: Any, _base: str) -> list[str]:
    links = [href[4:] for href in root.xpath("//a/@href[starts-with(., 'tel:')]")]
    texts = [
        text
        for text in _PHONE.findall(_visible_text(root))
        # A year range or an order number is not written with a plus sign or a parenthesis.
        if text.startswith(("+", "(")) and 7 <= sum(map(str.isdigit, text)) <= 15
    ]
    return _unique(_squeeze(text) for text in [*links, *texts])


def _headings(root: Any, _base: str) -> list[str]:
    return [
        text
        for element in root.iter("h1", "h2", "h3", "h4", "h5", "h6")
        if (text := _squeeze(element.text_content()))
    ]


def _menus(root: Any, _base: str) -> list[list[str]]:
    menus = (
        [text for link in menu.iter("a") if (text := _squeeze(link.text_content()))]
        for menu in root.xpath("//nav | //*[@role='navigation' or @role='menu'] | //menu")
    )
    return [menu for menu in menus if menu]


def _hashtags(root: Any, _base: str) -> list[str]:
    return _unique(iter(_HASHTAG.findall(_visible_text(root))))


def _favicon(root: Any, base: str) -> str:
    icons = _absolute(root, "//link[contains(concat(' ', @rel, ' '), ' icon ')]/@href", base)
    return icons[0] if icons else _join(base, "/favicon.ico")


def _tables(root: Any, _base: str) -> list[dict[str, object]]:
    return [_table(table) for table in root.iter("table")]


def _table(table: Any) -> dict[str, object]:
    """A row is an object by the names of the heading, or a list if there is none that fits."""
    rows = [
        [_squeeze(cell.text_content()) for cell in row.iterchildren("td", "th")]
        for row in table.iter("tr")
    ]
    first = next(table.iter("tr"), None)
    has_heading = first is not None and len(first) > 0 and all(cell.tag == "th" for cell in first)
    heading = rows[0] if has_heading else []
    content = [row for row in rows[1 if has_heading else 0 :] if row]
    is_named = bool(heading) and len(set(heading)) == len(heading)
    return {
        "dimensions": {
            "rows": len(content),
            "columns": max(map(len, rows), default=0),
            "heading": has_heading,
        },
        "heading": heading,
        "content": [
            dict(zip(heading, row, strict=True)) if is_named and len(row) == len(heading) else row
            for row in content
        ],
    }


_OUTPUTS: Mapping[str, Callable[[Any, str], object]] = {
    "audios": lambda root, base: _absolute(root, "//audio/@src | //audio/source/@src", base),
    "emails": _emails,
    "favicon": _favicon,
    "hashtags": _hashtags,
    "headings": _headings,
    "images": lambda root, base: _absolute(root, "//img/@src | //img/@data-src", base),
    "links": lambda root, base: _absolute(root, "//a/@href | //area/@href", base),
    "menus": _menus,
    "metadata": lambda root, _base: {"title": _title(root), **_metadata(root)},
    "phone_numbers": _phone_numbers,
    "tables": _tables,
    "videos": lambda root, base: _absolute(
        root,
        "//video/@src | //video/source/@src"
        " | //iframe[contains(@src, 'youtube') or contains(@src, 'vimeo')]/@src",
        base,
    ),
}


# response_type


def to_plaintext(text: str) -> str:
    """Returns what a reader sees, with a line for each block."""
    from html_text import extract_text

    return extract_text(_shallow(text)).strip() + "\n"


def to_markdown(text: str) -> str:
    from lxml import html
    from markdownify import markdownify

    root = _shallow(text)
    for element in list(root.iter(*_DROPPED, "head")):
        element.drop_tree()
    converted = markdownify(
        html.tostring(root, encoding="unicode"), heading_style="ATX", bullets="-"
    )
    return re.sub(r"\n{3,}", "\n\n", converted).strip() + "\n"


def _shallow(text: str) -> Any:
    """The converters call themselves for each level of the page."""
    root = parse(text)
    depth = 0
    from lxml.etree import iterwalk

    for event, _ in iterwalk(root, events=("start", "end")):
        depth += 1 if event == "start" else -1
        if depth > _DEPTH_MAX:
            raise NotExtracted("too_large", f"the page has elements {_DEPTH_MAX} levels deep")
    return root
