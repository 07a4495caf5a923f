"""`robots.txt`: which paths of a site a crawler may fetch (RFC 9309)."""

from __future__ import annotations

import re
import string
from urllib.parse import quote

import msgspec

from conveyor.domain.model import Problem
from conveyor.domain.submit.url_normalization import normalize_escapes, normalize_path

# RFC 9309, 2.5: a crawler parses at least the first 500 KiB.
ROBOTS_BYTES_MAX = 512 * 1024
# Statuses that say what a site has for robots.txt: the file, or that there is none. A gateway that
# is asked to return them says which one it was, and no verdict is made on the content.
ROBOTS_STATUSES = "200,400,401,402,403,404,405,406,410,418,421,422,451"
AGENT = "conveyor"
"""The name that groups of a robots.txt use for this program."""
# Some sites ask for hours between two pages. A crawler that waits longer would never end.
CRAWL_DELAY_S_MAX = 60.0
# Words of all patterns with `*` or `$`. Each page is compared with each of them on the event loop.
# Further patterns are not read; those of large shops have a few hundred words.
WORDS_MAX = 1_000
_AGENT = re.compile(r"[a-zA-Z_-]+")
_LINE_END = re.compile(r"\r\n?|\n")


class Rule(msgspec.Struct, frozen=True):
    """One path pattern. The longest pattern that matches decides.

    `words` are the texts between its wildcards; `is_end` says that the last one ends the path.
    """

    words: tuple[str, ...]
    is_end: bool
    length: int
    is_allowed: bool

    def matches(self, path: str) -> bool:
        """Takes the first place of each word. A regular expression would try all of them, which
        takes hours for some patterns."""
        first, *others = self.words
        if not path.startswith(first):
            return False
        place = len(first)
        last = others.pop() if self.is_end and others else None
        for word in others:
            start = path.find(word, place)
            if start < 0:
                return False
            place = start + len(word)
        if last is None:
            return not self.is_end or place == len(path)
        return path.endswith(last) and len(path) - len(last) >= place


class RobotsRules(msgspec.Struct, frozen=True):
    """The rules for one crawler at one site. `plain` has the patterns that are beginnings of paths,
    each with whether it allows. `unknown_because` is not empty if the file could not be read."""

    rules: tuple[Rule, ...] = ()
    plain: dict[str, bool] = {}
    crawl_delay_s: float = 0.0
    sitemaps: tuple[str, ...] = ()
    unknown_because: str = ""

    def allows(self, path_and_query: str) -> bool:
        if not (self.rules or self.plain) or path_and_query == "/robots.txt":
            return True
        path = normalize_path(path_and_query)
        # Of two equally long patterns the one that allows decides.
        best = (-1, True)
        for length in range(len(path), 0, -1):
            is_allowed = self.plain.get(path[:length])
            if is_allowed is not None:
                best = (length, is_allowed)
                break
        for rule in self.rules:
            if (rule.length, rule.is_allowed) > best and rule.matches(path):
                best = (rule.length, rule.is_allowed)
        return best[1]


def deny_all(problem: Problem | None) -> RobotsRules:
    """Returns the rules of a site whose robots.txt cannot be read: nothing is known to be
    allowed. `problem` is that of its task."""
    cause = "its answer is lost" if problem is None else problem.detail or problem.title
    return RobotsRules((_rule_from("", is_allowed=False),), unknown_because=cause)


def rules_in(body: bytes) -> RobotsRules:
    """Returns the rules of a robots.txt for this program. Of a longer file the first part counts,
    up to the end of a line: half a rule could be one that forbids everything."""
    if len(body) > ROBOTS_BYTES_MAX:
        body = body[: body.rfind(b"\n", 0, ROBOTS_BYTES_MAX) + 1]
    return parse_robots(body.decode(errors="replace"), AGENT)


def parse_robots(text: str, agent: str) -> RobotsRules:
    """Returns the rules for `agent`: those of its own groups, or those of the groups for `*`."""
    groups: dict[str, list[tuple[str, str]]] = {}
    names: list[str] = []
    sitemaps: list[str] = []
    is_heading = False
    for line in _LINE_END.split(text.removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}")):
        field, _, value = (part.strip() for part in line.partition("#")[0].partition(":"))
        field = field.lower()
        if field == "user-agent":
            names = [*names, _agent_name(value)] if is_heading else [_agent_name(value)]
            groups.setdefault(names[-1], [])
            is_heading = True
        elif field in {"allow", "disallow", "crawl-delay"}:
            is_heading = False
            for name in names:
                groups[name].append((field, value))
        elif field == "sitemap" and value:
            sitemaps.append(value)
    return _rules_from(groups.get(agent.lower(), groups.get("*", [])), sitemaps)


def is_without_rules(code: str, status: int) -> bool:
    """Whether the problem of a robots.txt means that the site has none, so that all is allowed.
    Otherwise the site may have rules that could not be read.

    Sites without the file often answer with a page instead, whatever its status: an error page, or
    the empty shell of an application. Such a page has a verdict, whose code begins with `page_`.
    """
    is_answer = code.startswith(("target_", "page_"))
    if is_answer and status < 500 and status != 429:
        return True
    return code in {"body_too_large", "unexpected_status", "bad_redirect"}


def _agent_name(value: str) -> str:
    match = _AGENT.match(value)
    return match[0].lower() if match else value[:1]


def _rules_from(lines: list[tuple[str, str]], sitemaps: list[str]) -> RobotsRules:
    rules: list[Rule] = []
    plain: dict[str, bool] = {}
    words_left = WORDS_MAX
    for field, value in lines:
        if field == "crawl-delay" or not value:
            continue
        rule = _rule_from(value, is_allowed=field == "allow")
        if len(rule.words) == 1 and not rule.is_end:
            (word,) = rule.words
            plain[word] = rule.is_allowed or plain.get(word, False)
        elif len(rule.words) <= words_left:
            words_left -= len(rule.words)
            rules.append(rule)
    delays = [_seconds_of(value) for field, value in lines if field == "crawl-delay"]
    return RobotsRules(tuple(rules), plain, max(delays, default=0.0), tuple(sitemaps))


def _rule_from(value: str, *, is_allowed: bool) -> Rule:
    """Patterns and paths are compared in one spelling: RFC 9309, 2.2.2."""
    pattern = normalize_escapes(quote(value, safe=string.printable))
    is_end = pattern.endswith("$")
    words = tuple(pattern.removesuffix("$").split("*"))
    return Rule(words, is_end, len(pattern), is_allowed)


def _seconds_of(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        return 0.0
    return min(max(seconds, 0.0), CRAWL_DELAY_S_MAX)
