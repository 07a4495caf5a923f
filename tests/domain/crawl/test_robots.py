"""Rules of robots.txt, as RFC 9309 has them."""

from __future__ import annotations

import pytest

from conveyor.domain.crawl.robots import CRAWL_DELAY_S_MAX, is_without_rules, parse_robots

TEXT = """
# A site
User-agent: other
Disallow: /

User-Agent: conveyor
User-agent: another-bot
Disallow: /private/
Allow: /private/open
Disallow: /*.pdf$
Crawl-delay: 2.5

User-agent: *
Disallow: /everyone
"""


@pytest.mark.parametrize(
    ("path", "is_allowed"),
    [
        ("/", True),
        ("/private/x", False),
        ("/private/open/x", True),
        ("/a/b.pdf", False),
        ("/a/b.pdf?x=1", True),
        ("/everyone", True),
        ("/robots.txt", True),
    ],
)
def test_the_longest_pattern_of_the_own_group_decides(path: str, is_allowed: bool) -> None:
    assert parse_robots(TEXT, "conveyor").allows(path) is is_allowed


def test_without_an_own_group_the_group_for_all_counts() -> None:
    rules = parse_robots(TEXT, "somebot")

    assert not rules.allows("/everyone/x")
    assert rules.allows("/private/")


def test_a_crawl_delay_is_bounded() -> None:
    assert parse_robots(TEXT, "conveyor").crawl_delay_s == 2.5
    assert parse_robots("User-agent: *\nCrawl-delay: 1e9", "x").crawl_delay_s == CRAWL_DELAY_S_MAX


@pytest.mark.parametrize("text", ["", "<html>no such file</html>", "Disallow: /", "\x00\xff:"])
def test_what_names_no_crawler_forbids_nothing(text: str) -> None:
    assert parse_robots(text, "conveyor").allows("/x")


@pytest.mark.parametrize(
    ("code", "status", "has_none"),
    [
        ("target_404", 404, True),
        ("target_blocked", 403, True),
        ("page_soft_404", 200, True),
        ("page_shell", 200, True),
        ("page_challenge", 403, True),
        ("page_challenge", 503, False),
        ("target_rate_limited", 429, False),
        ("target_server_error", 503, False),
        ("connect_failed", 502, False),
    ],
)
def test_an_answer_that_is_no_robots_txt_means_that_there_is_none(
    code: str, status: int, has_none: bool
) -> None:
    """A site that is overloaded, fails or cannot be reached may have rules."""
    assert is_without_rules(code, status) is has_none


def test_an_empty_disallow_allows_everything() -> None:
    assert parse_robots("User-agent: *\nDisallow:", "conveyor").allows("/x")
