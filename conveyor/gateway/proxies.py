"""Proxies: which proxy a call goes through (docs/gateway.md, Proxies).

A proxy has a country and a class. `premium_proxy` wants one of the class `premium`, `proxy_country`
one of that country, and `session_id` the same one as before. Without wishes, a call goes through
the proxies of the class `standard`, which take turns for each host, and directly if there are none.

A proxy that cannot be used is left out for a time that doubles with each failure; the first call
after that time is its health check. A proxy that a host refused is left out for that host. When
none is left, the one whose time ends first is used: a proxy that may work is better than none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import msgspec
import trio

from conveyor.domain.errors import ConveyorError
from conveyor.domain.submit.target import Target
from conveyor.http_client.pool import HttpPool

PREMIUM = "premium"
CLASSES = ("standard", PREMIUM)
# A proxy that a host refused is left out for that host for this time, doubled each time.
REFUSED_S = 60.0
REFUSED_S_MAX = 3600.0
# Hosts that are remembered with the proxies that they refused.
HOSTS_MAX = 10_000
PROXIES_MAX = 10_000
_COUNTRY = re.compile(r"[a-z]{2}\Z")


class BadProxyFile(ConveyorError):
    """A line cannot be read. The message has its number, and not the line: it has credentials."""


class ProxyLine(msgspec.Struct, frozen=True):
    """A line such as `socks5://user:password@host:1080 country=us class=premium`."""

    url: str
    country: str | None = None
    is_premium: bool = False


class Wishes(msgspec.Struct, frozen=True):
    """What a call wants of its proxy."""

    is_premium: bool = False
    country: str | None = None
    session: str | None = None


class Route(Protocol):
    """The way through one proxy. `bad_until` is a time of Trio's clock."""

    pool: HttpPool

    @property
    def bad_until(self) -> float: ...

    async def dial(self, target: Target, partition: str) -> trio.SocketStream: ...


class Proxy(msgspec.Struct, frozen=True, eq=False):
    country: str | None
    is_premium: bool
    route: Route


def read_proxies(path: Path) -> list[ProxyLine]:
    """Reads a file with a proxy on each line. Raises BadProxyFile."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadProxyFile(f"{path} cannot be read: {type(error).__name__}") from None
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            lines.append(_read_line(f"{path}, line {number}", words))
    if not 0 < len(lines) <= PROXIES_MAX:
        raise BadProxyFile(f"{path} has {len(lines)} proxies; 1 to {PROXIES_MAX} are possible")
    return lines


def _read_line(place: str, words: Sequence[str]) -> ProxyLine:
    url, *labels = words
    values: dict[str, str] = {}
    for label in labels:
        name, _, value = label.lower().partition("=")
        if name not in {"country", "class"} or name in values:
            raise BadProxyFile(f"{place}: after the URL there may be country=XX and class=NAME")
        values[name] = value
    if "country" in values and _COUNTRY.match(values["country"]) is None:
        raise BadProxyFile(f"{place}: a country is a code of two letters")
    if values.get("class", "standard") not in CLASSES:
        raise BadProxyFile(f"{place}: a class is one of {', '.join(CLASSES)}")
    return ProxyLine(url, values.get("country"), values.get("class") == PREMIUM)


class ProxyPool:
    def __init__(self, proxies: Sequence[Proxy]) -> None:
        self._proxies = list(proxies)
        self._turns: dict[str, int] = {}
        # Until when a host refuses a proxy, and how often it has done so.
        self._refusals: dict[str, dict[Proxy, tuple[float, int]]] = {}

    @property
    def has_premium(self) -> bool:
        return any(proxy.is_premium for proxy in self._proxies)

    @property
    def honoured(self) -> Mapping[str, str]:
        """The parameters that these proxies honour."""
        honoured = {"premium_proxy": ""} if self.has_premium else {}
        countries = {proxy.country for proxy in self._proxies if proxy.country is not None}
        for country in countries:
            honoured[f"proxy_country={country}"] = ""
            honoured[f"proxy_country={country.upper()}"] = ""
        return honoured

    def has_any(self, wishes: Wishes) -> bool:
        return bool(self._matching(wishes))

    def choose(self, host: str, wishes: Wishes) -> Proxy | None:
        """Returns the proxy for the next call to this host, or None to connect directly."""
        matching = self._matching(wishes)
        if not matching:
            return None
        if wishes.session is None:
            start = self._turns.pop(host, 0)
            _keep_recent(self._turns)
            self._turns[host] = start + 1
        else:
            start = int.from_bytes(sha256(wishes.session.encode()).digest()[:8])
        first = start % len(matching)
        ring = [*matching[first:], *matching[:first]]
        now = trio.current_time()
        return next(
            (proxy for proxy in ring if self._left_out_until(host, proxy) <= now),
            min(ring, key=lambda proxy: self._left_out_until(host, proxy)),
        )

    def record_refusal(self, host: str, proxy: Proxy) -> None:
        """The host did not give this proxy a page."""
        refusals = self._refusals.pop(host, {})
        _keep_recent(self._refusals)
        _, count = refusals.get(proxy, (0.0, 0))
        seconds = min(REFUSED_S * 2.0 ** min(count, 16), REFUSED_S_MAX)
        refusals[proxy] = (trio.current_time() + seconds, count + 1)
        self._refusals[host] = refusals

    def record_page(self, host: str, proxy: Proxy) -> None:
        self._refusals.get(host, {}).pop(proxy, None)

    def _matching(self, wishes: Wishes) -> list[Proxy]:
        return [
            proxy
            for proxy in self._proxies
            if proxy.is_premium == wishes.is_premium and wishes.country in {None, proxy.country}
        ]

    def _left_out_until(self, host: str, proxy: Proxy) -> float:
        refused_until, _ = self._refusals.get(host, {}).get(proxy, (0.0, 0))
        return max(refused_until, proxy.route.bad_until)


def _keep_recent(hosts: dict[str, int] | dict[str, dict[Proxy, tuple[float, int]]]) -> None:
    while len(hosts) >= HOSTS_MAX:
        del hosts[next(iter(hosts))]
