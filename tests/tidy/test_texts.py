"""No markers of unfinished work, no addresses of local machines, and no references to texts that
readers do not have."""

from __future__ import annotations

import re

from tests.tidy.sources import text_files

# The patterns are split, so that this file does not match them.
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


def test_no_address_of_a_local_machine_appears() -> None:
    assert lines_with(PLACES) == []


def test_no_text_is_cited_that_readers_do_not_have() -> None:
    assert lines_with(PAPERS) == []


def test_no_line_ends_in_spaces_and_every_file_ends_in_a_line_break() -> None:
    untidy = [
        name
        for name, text in text_files()
        if text and (not text.endswith("\n") or re.search(r"[ \t]$", text, re.MULTILINE))
    ]

    assert untidy == []
