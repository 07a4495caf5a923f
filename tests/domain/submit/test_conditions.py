"""Conditions that a caller sets for a page: what is accepted, and which pages meet them."""

from __future__ import annotations

import pytest

from conveyor.domain import limits
from conveyor.domain.submit.conditions import find_unmet
from conveyor.domain.submit.scraper_params import InvalidParam, check_params

HTML = "text/html"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("min_bytes", "1.5"),
        ("min_bytes", -1),
        ("min_bytes", "many"),
        ("min_bytes", limits.BODY_BYTES_MAX + 1),
        ("must_match", "("),
        ("must_match", "(?=ahead)"),
        ("must_match", r"(a)\1"),
        ("must_match", r"\pL{1000}"),
        ("must_match", "(.{1,30}a.{1,30}b){9}"),
        ("must_match", "x" * (limits.MUST_MATCH_CHARS_MAX + 1)),
    ],
)
def test_a_condition_that_cannot_be_checked_is_refused(key: str, value: object) -> None:
    with pytest.raises(InvalidParam) as caught:
        check_params({key: value})

    assert caught.value.reason == "invalid_param_value"
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("params", "unmet"),
    [
        ({}, None),
        ({"min_bytes": "", "must_contain": "", "must_match": ""}, None),
        ({"min_bytes": "17"}, None),
        ({"min_bytes": "18"}, "min_bytes"),
        ({"must_contain": "Preis"}, None),
        ({"must_contain": "preis"}, "must_contain"),
        ({"must_match": r"\d+,\d\d €"}, None),
        ({"must_match": r"(?i)^<b>PREIS"}, None),
        ({"must_match": r"\d{4}"}, "must_match"),
        ({"must_contain": "Preis", "must_match": "x"}, "must_match"),
    ],
)
def test_a_page_is_compared_with_each_condition(params: dict[str, str], unmet: str | None) -> None:
    assert find_unmet(params, "<b>Preis 9,50 €".encode(), HTML) == unmet


def test_a_pattern_with_catastrophic_backtracking_is_matched_in_bounded_time() -> None:
    page = b"a" * 200_000

    assert find_unmet({"must_match": "(a+)+$"}, page, HTML) is None
    assert find_unmet({"must_match": "(a|aa)+b"}, page, HTML) == "must_match"


def test_a_pattern_searches_only_the_start_of_a_long_page() -> None:
    page = b" " * limits.MATCHED_CHARS_MAX + b"end"

    assert find_unmet({"must_match": "end"}, page, HTML) == "must_match"
    assert find_unmet({"must_contain": "end"}, page, HTML) is None
