"""URLs of a crawl: the normal form that makes two links one page, and the site of a crawl
(docs/crawls.md, One page, one URL)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from conveyor.domain import limits
from conveyor.domain.submit.target import BadUrl, Target, join, parse_url
from conveyor.domain.submit.url_normalization import normalize_target

# Parameters that name a visit or a campaign and not a page. Kept short: each further name is a page
# lost on a site that uses it otherwise.
_VISIT = frozenset(
    {
        "_ga",
        "aspsessionid",
        "cfid",
        "cftoken",
        "dclid",
        "fbclid",
        "gclid",
        "igshid",
        "jsessionid",
        "mc_cid",
        "mc_eid",
        "msclkid",
        "phpsessid",
        "session_id",
        "sessionid",
        "sid",
        "yclid",
    }
)
_VISIT_PREFIX = "utm_"
_PATH_SESSION = re.compile(r";(?:jsessionid|sid|phpsessid)=[^/;?]*", re.IGNORECASE)
# Links to these are files and not pages. A list of what is no page, because pages end in anything.
_FILE = re.compile(
    r"\.(?:7z|avi|avif|bmp|bz2|css|dmg|doc|docx|eot|exe|flac|gif|gz|ico|iso|jpeg|jpg|js|m4a|m4v|mkv"
    r"|mov|mp3|mp4|mpeg|mpg|msi|odp|ods|odt|ogg|otf|pdf|png|ppt|pptx|rar|rss|svg|tar|tgz|tif|tiff"
    r"|ttf|wav|webm|webp|wmv|woff|woff2|xls|xlsx|zip)\Z",
    re.IGNORECASE,
)
# Second-level domains under which countries let others register, as in example.co.uk.
_PUBLIC_SECOND_LEVEL = frozenset(
    {"ac", "co", "com", "edu", "gob", "gov", "gv", "ltd", "mil", "ne", "net", "or", "org", "plc"}
)


def normalize(url: str) -> str | None:
    """Returns the one URL that represents all spellings of a page; None if it is no URL."""
    target = parse_url(url, chars_max=limits.URL_CHARS_MAX)
    return None if isinstance(target, BadUrl) else normal_form(target)


def normal_form(target: Target) -> str:
    """Returns the normal form of a URL as a page of a crawl: without sessions and campaigns, and
    with a sorted query."""
    target = normalize_target(target)
    path, _, query = target.path_and_query.partition("?")
    pairs = sorted(pair for pair in query.split("&") if pair and not _is_visit(pair))
    tail = f"?{'&'.join(pairs)}" if pairs else ""
    return f"{target.scheme}://{target.authority}{_PATH_SESSION.sub('', path)}{tail}"


def resolve(base: Target, reference: str) -> Target | None:
    """Returns where a link on a page leads, or None if no page can be there."""
    target = join(base, reference.strip())
    if isinstance(target, BadUrl) or len(target.url) > limits.URL_CHARS_MAX:
        return None
    return target


def is_file(url: str) -> bool:
    """Whether the path of a normal form ends like a file that has no links."""
    return _FILE.search(url.partition("?")[0]) is not None


def origin_of(url: str) -> str:
    """Returns scheme, host and port of a normal form: the part with its own robots.txt."""
    return "/".join(url.split("/", 3)[:3])


def host_in(url: str) -> str:
    target = parse_url(url)
    assert isinstance(target, Target)
    return target.host


@lru_cache(maxsize=4096)
def site_of(host: str) -> str:
    """Returns the registrable domain of a host; the host itself if it is an address.

    An approximation of the public suffix list, which changes every week: a country may let others
    register under one of a few well-known second-level domains.
    """
    labels = host.split(".")
    if ":" in host or labels[-1].isdigit() or len(labels) < 3:
        return host
    is_deep = len(labels[-1]) == 2 and labels[-2] in _PUBLIC_SECOND_LEVEL
    return ".".join(labels[-3 if is_deep else -2 :])


class LinkFilter(msgspec.Struct, frozen=True):
    """Which pages a crawl follows, and which it keeps. Patterns are parts of a normal form."""

    site: str  #: The registrable domain that the crawl stays on.
    include: Sequence[str] = ()  #: A kept page has one of these, if there are any.
    exclude: Sequence[str] = ()  #: A page with one of these is neither followed nor kept.

    def is_on_site(self, url: str) -> bool:
        return site_of(host_in(url)) == self.site

    def follows(self, url: str) -> bool:
        return self.is_on_site(url) and not is_file(url) and not self._excludes(url)

    def keeps(self, url: str) -> bool:
        is_included = not self.include or any(pattern in url for pattern in self.include)
        return is_included and not self._excludes(url)

    def _excludes(self, url: str) -> bool:
        return any(pattern in url for pattern in self.exclude)


def _is_visit(pair: str) -> bool:
    name = pair.partition("=")[0].lower()
    return name in _VISIT or name.startswith((_VISIT_PREFIX, "aspsessionid"))
