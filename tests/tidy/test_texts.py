"""No stray markers, no addresses of somebody's machine, and nothing that readers cannot follow."""

from __future__ import annotations

import re

from tests.tidy.sources import text_files

# Written in pieces, so that this file does not find itself.
MARKERS = re.compile(
    r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK"]) + r")\b"
)
PLACES = re.compile(
    "|".join(["sha" + "red/", "/wo" + "rk/", "/ho" + "me/", "/Us" + "ers/", "/ro" + "ot/"])
)
PAPERS = re.compile(
    "|".join(["RELI" + "ABILITY", "DES" + "IGN.md", "STY" + "LE.md", r"\bW\d{2,3}\b"])
)


def lines_with(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()[:80]}"
        for name, text in text_files()
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]


def test_no_marker_of_unfinished_work_is_left() -> None:
    assert lines_with(MARKERS) == []


def test_no_address_of_somebodys_machine_appears() -> None:
    assert lines_with(PLACES) == []


def test_no_paper_is_cited_that_readers_do_not_have() -> None:
    assert lines_with(PAPERS) == []


def test_no_line_ends_in_spaces_and_every_file_in_a_line_break() -> None:
    untidy = [
        name
        for name, text in text_files()
        if text and (not text.endswith("\n") or re.search(r"[ \t]$", text, re.MULTILINE))
    ]

    assert untidy == []
