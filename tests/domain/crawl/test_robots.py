"""The rules of robots.txt, as RFC 9309 defines them."""

from __future__ import annotations

import time

import pytest

from conveyor.domain.crawl.robots import (
    CRAWL_DELAY_S_MAX,
    ROBOTS_BYTES_MAX,
    is_without_rules,
    parse_robots,
    rules_in,
)

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
def test_the_longest_matching_pattern_of_the_crawlers_own_group_decides(
    path: str, is_allowed: bool
) -> None:
    assert parse_robots(TEXT, "conveyor").allows(path) is is_allowed


def test_the_default_group_applies_without_a_group_of_the_crawlers_own() -> None:
    rules = parse_robots(TEXT, "somebot")

    assert not rules.allows("/everyone/x")
    assert rules.allows("/private/")


def test_a_crawl_delay_is_bounded() -> None:
    assert parse_robots(TEXT, "conveyor").crawl_delay_s == 2.5
    assert parse_robots("User-agent: *\nCrawl-delay: 1e9", "x").crawl_delay_s == CRAWL_DELAY_S_MAX


@pytest.mark.parametrize("text", ["", "<html>no such file</html>", "Disallow: /", "\x00\xff:"])
def test_a_file_without_a_user_agent_group_forbids_nothing(text: str) -> None:
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
def test_only_some_failures_mean_that_a_site_has_no_robots_txt(
    code: str, status: int, has_none: bool
) -> None:
    """A site that is overloaded, fails or cannot be reached may have rules."""
    assert is_without_rules(code, status) is has_none


def test_an_empty_disallow_allows_everything() -> None:
    assert parse_robots("User-agent: *\nDisallow:", "conveyor").allows("/x")


@pytest.mark.parametrize(
    ("pattern", "path", "is_match"),
    [
        ("/a*c", "/abbcd", True),
        ("/a*c$", "/abbcd", False),
        ("/a*c$", "/abcbc", True),
        ("/*ab*ab$", "/ab", False),
        ("/a$", "/a", True),
        ("/a$", "/a?b", False),
        ("*", "/x", True),
        ("/a**b", "/aab", True),
        ("/a$b", "/a$b", True),
    ],
)
def test_wildcards_match_any_text_and_a_dollar_sign_the_end(
    pattern: str, path: str, is_match: bool
) -> None:
    rules = parse_robots(f"User-agent: *\nDisallow: {pattern}", "conveyor")

    assert rules.allows(path) is not is_match


def test_a_pattern_of_many_wildcards_takes_no_time() -> None:
    """A regular expression with 40 wildcards tries every way to share a path among them."""
    rules = parse_robots(f"User-agent: *\nDisallow: {'*a' * 40}b", "conveyor")

    began_at = time.process_time()
    assert rules.allows("/" + "a" * 2000)
    assert time.process_time() - began_at < 0.1


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("/\N{LATIN SMALL LETTER U WITH DIAERESIS}", "/%C3%BC"),
        ("/%c3%bc", "/%C3%BCx"),
        ("/f%6fo", "/foo"),
        ("/foo", "/f%6Fo"),
        ("/private", "/open/../private/x"),
        ("/private", "/open/%2E%2e/private/x"),
    ],
)
def test_spellings_of_one_path_are_compared_as_equal(pattern: str, path: str) -> None:
    assert not parse_robots(f"User-agent: *\nDisallow: {pattern}", "conveyor").allows(path)


def test_an_escaped_slash_is_not_a_slash() -> None:
    assert parse_robots("User-agent: *\nDisallow: /a%2Fb", "conveyor").allows("/a/b")


def test_text_that_is_no_line_break_in_a_file_is_none_in_robots_txt() -> None:
    text = "User-agent: *\r\rDisallow: /a\x0bb\rDisallow: /c"

    rules = parse_robots(text, "conveyor")

    assert rules.allows("/a")
    assert not rules.allows("/c")


def test_the_first_part_of_a_long_file_counts_up_to_the_end_of_a_line() -> None:
    head = b"User-agent: *\nDisallow: /private\n"
    filler = b"#" * (ROBOTS_BYTES_MAX - len(head) - len(b"\nDisallow: /")) + b"\n"

    rules = rules_in(head + filler + b"Disallow: /open\n" + filler)

    assert not rules.allows("/private")
    assert rules.allows("/open")


@pytest.mark.parametrize("line", ["Disallow: /x*q\n", "Disallow: /x\n", "Disallow: /*q*q*q$\n"])
def test_a_file_of_many_patterns_costs_about_a_millisecond_a_page(line: str) -> None:
    rules = rules_in(b"User-agent: *\n" + line.encode() * 30_000)

    begun_s = time.thread_time()
    for _ in range(50):
        rules.allows("/x" + "y" * 2_000)

    assert time.thread_time() - begun_s < 0.5
