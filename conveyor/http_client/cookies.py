"""Cookies of one chain of redirects (docs/engines.md, Gateways).

Many sites set a cookie and redirect to the page that was asked for, again and again until the
cookie is there. So a fetch keeps cookies by the rules of RFC 6265 while it follows redirects, and
forgets them when it ends.
"""

from __future__ import annotations

import re
from email.utils import parsedate_to_datetime

import msgspec

from conveyor.domain.crawl.urls import site_of
from conveyor.domain.submit.target import Target
from conveyor.http_client.exchange import Headers, Response

# What a site may make the client remember and send: about as much as servers accept in a head.
COOKIES_MAX = 50
COOKIE_BYTES_MAX = 8192

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_MAX_AGE = re.compile(r"-?[0-9]+\Z")
# A response without a date: no site lets a new cookie end before 2001.
_EARLIEST_S = 1e9


class _Cookie(msgspec.Struct, frozen=True):
    """`value` is None for a removed cookie, which hides one of the caller's header."""

    name: str
    value: str | None
    domain: str
    path: str
    is_host_only: bool
    is_secure: bool

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.name, self.domain, self.path)

    @property
    def size_bytes(self) -> int:
        return len(self.name.encode()) + len((self.value or "").encode())

    def is_sent_to(self, target: Target) -> bool:
        if self.is_secure and not target.is_tls:
            return False
        is_same_host = target.host == self.domain
        if not is_same_host and (self.is_host_only or not target.host.endswith("." + self.domain)):
            return False
        path = target.path_and_query.partition("?")[0]
        return path == self.path or path.startswith(self.path.removesuffix("/") + "/")


class Cookies:
    """The cookies that the responses of one chain set."""

    def __init__(self) -> None:
        self._cookies: dict[tuple[str, str, str], _Cookie] = {}
        self._bytes = 0

    def remember(self, target: Target, response: Response) -> None:
        """Takes the cookies that `target` set, as far as it may set them and there is room."""
        values = [value for name, value in response.headers if name == b"set-cookie"]
        if not values:
            return
        sent_at = _seconds(response.header(b"date")) or _EARLIEST_S
        for value in values:
            cookie = _parse(value, target, sent_at)
            if cookie is not None and not self._hides_secure_one(cookie, target):
                self._put(cookie)

    def _put(self, cookie: _Cookie) -> None:
        old = self._cookies.get(cookie.key)
        size_bytes = self._bytes + cookie.size_bytes - (old.size_bytes if old else 0)
        if size_bytes > COOKIE_BYTES_MAX or (old is None and len(self._cookies) >= COOKIES_MAX):
            return
        self._cookies[cookie.key] = cookie
        self._bytes = size_bytes

    def _hides_secure_one(self, cookie: _Cookie, target: Target) -> bool:
        """Whether a plain http page would replace a cookie that only https may have."""
        return not target.is_tls and any(
            other.is_secure
            and other.name == cookie.name
            and site_of(other.domain) == site_of(target.host)
            for other in self._cookies.values()
        )

    def add_to(self, headers: Headers, target: Target) -> Headers:
        """Returns the headers of a request with its cookies after those that the caller stated. A
        cookie of the chain replaces the caller's one of the same name."""
        cookies = [cookie for cookie in self._cookies.values() if cookie.is_sent_to(target)]
        if not cookies:
            return headers
        names = {cookie.name for cookie in cookies}
        others = [pair for pair in headers if pair[0].lower() != "cookie"]
        stated = [
            pair
            for name, value in headers
            if name.lower() == "cookie"
            for pair in (part.strip() for part in value.split(";"))
            if pair and pair.partition("=")[0].strip() not in names
        ]
        # As browsers do: the cookies of the longest path first.
        cookies.sort(key=lambda cookie: -len(cookie.path))
        ours = [f"{cookie.name}={cookie.value}" for cookie in cookies if cookie.value is not None]
        if stated or ours:
            others.append(("Cookie", "; ".join([*stated, *ours])))
        return tuple(others)


def _parse(header: bytes, target: Target, sent_at: float) -> _Cookie | None:
    """Returns the cookie, or None for one that is malformed or that `target` may not set."""
    try:
        text = header.decode()
    except UnicodeDecodeError:
        return None
    if _CONTROL.search(text):
        return None
    pair, *rest = text.split(";")
    name, has_value, value = (part.strip() for part in pair.partition("="))
    if not name or not has_value:
        return None
    attributes = dict(_attribute(part) for part in rest)
    is_secure = "secure" in attributes
    domain, path = attributes.get("domain", "").removeprefix("."), attributes.get("path", "")
    if is_secure and not target.is_tls:
        return None
    if domain and not _may_set_for(target.host, domain):
        return None
    lower = name.lower()
    if lower.startswith(("__secure-", "__host-")) and not is_secure:
        return None
    if lower.startswith("__host-") and (domain or path != "/"):
        return None
    return _Cookie(
        name=name,
        value=None if _has_ended(attributes, sent_at) else value,
        domain=domain or target.host,
        path=path if path.startswith("/") else _default_path(target),
        is_host_only=not domain,
        is_secure=is_secure,
    )


def _attribute(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    name, value = name.strip().lower(), value.strip()
    return name, value.lower() if name == "domain" else value


def _may_set_for(host: str, domain: str) -> bool:
    is_above = host == domain or host.endswith("." + domain)
    return is_above and site_of(host) == site_of(domain)


def _has_ended(attributes: dict[str, str], sent_at: float) -> bool:
    max_age = attributes.get("max-age", "")
    if _MAX_AGE.match(max_age):
        return max_age.startswith("-") or not max_age.strip("0")
    ends_at = _seconds(attributes.get("expires"))
    return ends_at is not None and ends_at <= sent_at


def _seconds(date: str | None) -> float | None:
    try:
        return parsedate_to_datetime(date).timestamp() if date else None
    except (ValueError, TypeError, OverflowError):
        return None


def _default_path(target: Target) -> str:
    return target.path_and_query.partition("?")[0].rpartition("/")[0] or "/"
