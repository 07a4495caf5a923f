"""References from code and documents name sections and headings that exist.

A section of the specification is referred to as `SPEC.md 4.4`, a heading of another document as
`docs/engines.md, Gateways`, and a decision as `decision 0012`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from tests.tidy.sources import ROOT, text_files

_SECTION = re.compile(r"^#+ ((?:\d+\.)*\d+) ", re.MULTILINE)
_TITLE = re.compile(r"^#+ (.+)$", re.MULTILINE)
# A reference may be wrapped over lines, also in a comment.
_BREAK = re.compile(r"\s*\n\s*(?:(?:#:?|--) )?")
# The patterns are split, so that this file does not match them.
_OUTDATED = re.compile(r"\bSP" + r"EC (?:\d|D\d)")
_TO_SECTION = re.compile(r"SPEC\.md ((?:\d+(?:\.\d+)*)(?:(?:, | and )\d+(?:\.\d+)*)*)")
_TO_HEADING = re.compile(r"(docs/[a-z]+\.md), (.{0,60})")
_TO_DECISION = re.compile(r"\bdecision (\d{4})\b")
_IN_SPEC = re.compile(r"\((\d\.\d+(?:, \d\.\d+)*)\)")


def referring() -> Iterator[tuple[str, str]]:
    """Every file that can contain references, as one long line."""
    for name, text in text_files():
        if name.endswith((".py", ".sql", ".lua", ".md", ".toml")):
            yield name, _BREAK.sub(" ", text)


@cache
def sections() -> frozenset[str]:
    return frozenset(_SECTION.findall((ROOT / "SPEC.md").read_text(encoding="utf-8")))


@cache
def titles(document: str) -> tuple[str, ...]:
    path = ROOT / document
    return tuple(_TITLE.findall(path.read_text(encoding="utf-8"))) if path.exists() else ()


def test_every_referenced_section_exists() -> None:
    lost = [
        f"{name}: SPEC.md {number}"
        for name, text in referring()
        for reference in _TO_SECTION.findall(text)
        for number in re.split(", | and ", reference)
        if number not in sections()
    ]

    assert lost == []


def test_every_referenced_heading_exists() -> None:
    lost = [
        f"{name}: {document}, {words}"
        for name, text in referring()
        for document, words in _TO_HEADING.findall(text)
        if words[:1].isupper() and not _begins_with_one(words, titles(document))
    ]

    assert lost == []


def _begins_with_one(words: str, known: tuple[str, ...]) -> bool:
    return any(re.match(re.escape(title) + r"(?!\w)", words) for title in known)


def test_every_referenced_decision_exists() -> None:
    known = {path.name[:4] for path in (ROOT / "docs" / "decisions").glob("0*.md")}

    lost = [
        f"{name}: {number}"
        for name, text in referring()
        for number in _TO_DECISION.findall(text)
        if number not in known
    ]
    assert lost == []


def test_every_section_referenced_within_the_specification_exists() -> None:
    text = (ROOT / "SPEC.md").read_text(encoding="utf-8")

    numbers = [number for reference in _IN_SPEC.findall(text) for number in reference.split(", ")]
    assert numbers
    assert [number for number in numbers if number not in sections()] == []


def test_no_reference_uses_section_numbers_of_an_earlier_specification() -> None:
    old = [name for name, text in referring() if _OUTDATED.search(text)]

    assert old == []
