"""The names of page files: `--name` patterns such as `{host}/{path}`."""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import unquote

from conveyor.cli.scrape.pages import Page
from conveyor.domain.errors import ConveyorError
from conveyor.domain.submit.scraper_params import extension_for
from conveyor.domain.submit.target import Target, parse_url

FIELDS = ("index", "host", "path", "id")
# File systems allow 255 bytes in one part of a path; the extension and a number need some.
_PART_CHARS_MAX = 120
_PARTS_MAX = 16
_FIELD = re.compile(r"\{([^{}]*)\}")
_UNSAFE = re.compile(r"[^A-Za-z0-9._~@=+,()-]+")
_RESERVED = frozenset({"", ".", "..", ".conveyor", "results.jsonl"})


class BadPattern(ConveyorError):
    """A pattern that names no field, or an unknown one."""


def check_pattern(pattern: str) -> None:
    fields = _FIELD.findall(pattern)
    unknown = [field for field in fields if field not in FIELDS]
    if unknown or "{" in _FIELD.sub("", pattern) or "}" in _FIELD.sub("", pattern):
        known = ", ".join(f"{{{field}}}" for field in FIELDS)
        raise BadPattern(f"--name {pattern!r} may have the fields {known}.")
    if not fields or fields == ["host"]:
        raise BadPattern(f"--name {pattern!r} would give all pages the same name. Add {{index}}.")


Namer = Callable[[int, Page, str], str]


def make_namer(pattern: str) -> Namer:
    """Returns the function that names a page, given its index and content type.

    Unless the pattern has {index}, the index follows the name, because two pages may have the same
    path or id.
    """
    if pattern == "{index}":
        return lambda index, _, content_type: f"{index:06d}.{extension_for(content_type)}"
    has_index = "{index}" in pattern

    def name(index: int, page: Page, content_type: str) -> str:
        target = parse_url(page.url)
        assert isinstance(target, Target)
        fields = {
            "index": f"{index:06d}",
            "host": _safe(target.host),
            "path": _safe_path(target.path_and_query),
            "id": _safe(page.id or ""),
        }
        text = _FIELD.sub(lambda match: fields[match[1]], pattern)
        parts = [_part(part) for part in text.split("/") if part not in _RESERVED]
        stem = "/".join(parts[:_PARTS_MAX]) or "page"
        extension = extension_for(content_type)
        if not has_index:
            stem = f"{stem.removesuffix(f'.{extension}')}-{index:06d}"
        return f"{stem.removesuffix(f'.{extension}')}.{extension}"

    return name


def _safe(text: str) -> str:
    return _UNSAFE.sub("_", text)


def _safe_path(path_and_query: str) -> str:
    path, _, query = path_and_query.partition("?")
    text = unquote(path).strip("/") or "index"
    if query:
        text += f"_{query}"
    return "/".join(_safe(part) for part in text.split("/") if part not in _RESERVED)


def _part(text: str) -> str:
    # A leading dot would hide the file.
    return text[:_PART_CHARS_MAX].lstrip(".") or "_"
