"""A model of a scraping gateway: its limits, outages, headers and bill (docs/engines.md, Gateways;
docs/simulator.md).

The gateway bills every page that it returns. A call counts against the limit of its key from the
request until its answer was read or the connection broke. If the caller disconnects before the
answer, the gateway goes on working, and the call counts for as long as the answer would have taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from urllib.parse import parse_qsl

import trio

from conveyor.domain.submit.scraper_params import allowed_statuses
from conveyor.http_client.errors import ConnectFailed, FetchFailed
from conveyor.http_client.exchange import Request, Response
from conveyor.simulation.client_history import GatewayRefusal, History
from conveyor.simulation.faults.faults import Fault, Faults

Headers = tuple[tuple[bytes, bytes], ...]

UNREACHABLE, FAILING = Fault.GATEWAY_UNREACHABLE, Fault.GATEWAY_FAILING
OUTAGES = (UNREACHABLE, FAILING)

# Values that no gateway should send in its headers.
_FALSE = (b"0", b"-1", b"1", b"999999999999", b"99999999999999999999", b"many", b"")
_LIE_RATE = 0.3


@dataclass(slots=True)
class GatewayCall:
    """A call that counts against the limit of its key until this instant."""

    until: float


@dataclass(slots=True, kw_only=True)
class GatewayModel:
    """One gateway for all processes. `outage` is the fault with which it refuses every call at the
    moment."""

    plan: int
    lies: bool
    random: Random
    faults: Faults
    history: History
    outage: Fault | None = None
    _calls: dict[str, list[GatewayCall]] = field(default_factory=dict)

    def refuse(self, request: Request) -> Response | None:
        """Returns the refusal of a call; None if the gateway accepts it."""
        if self.outage is not None and not self.faults.is_calm:
            self.faults.count(self.outage)
            if self.outage is UNREACHABLE:
                raise ConnectFailed("no address took the connection")
            return Response(self.random.choice((500, 502, 503)), (), b"upstream error")
        key = key_of(request)
        if self.plan and self._busy_count(key) >= self.plan:
            self.faults.count(Fault.GATEWAY_LIMITED)
            refusal = GatewayRefusal(key=key, at=trio.current_time(), limit=self.plan)
            self.history.gateway_refusals.append(refusal)
            return Response(429, self._headers(key), b'{"code":"AUTH008"}')
        return None

    @contextmanager
    def occupy(self, request: Request, seconds: float) -> Iterator[None]:
        """Counts the call against the limit of its key for this time, or until its answer ends
        earlier."""
        call = GatewayCall(trio.current_time() + seconds)
        self._calls.setdefault(key_of(request), []).append(call)
        try:
            yield
        except FetchFailed:  # Either side closed the connection.
            call.until = trio.current_time()
            raise
        call.until = trio.current_time()

    def page_headers(self, request: Request) -> Headers:
        return self._headers(key_of(request))

    def _busy_count(self, key: str) -> int:
        now = trio.current_time()
        busy = [call for call in self._calls.get(key, []) if call.until > now]
        self._calls[key] = busy
        return len(busy)

    def _headers(self, key: str) -> Headers:
        if not self.plan:
            return ()
        remaining = max(0, self.plan - self._busy_count(key))
        headers = [
            (b"concurrency-limit", b"%d" % self.plan),
            (b"concurrency-remaining", b"%d" % remaining),
        ]
        if self.lies and not self.faults.is_calm and self.random.random() < _LIE_RATE:
            self.faults.count(Fault.GATEWAY_LIED)
            number = self.random.randrange(len(headers))
            headers[number] = (headers[number][0], self.random.choice(_FALSE))
        return tuple(headers)


def key_of(request: Request) -> str:
    """The API key of a call to the gateway."""
    return _params_of(request).get("apikey", "")


def url_of(request: Request) -> str:
    """The URL that a call asks the gateway to fetch."""
    return _params_of(request).get("url", "")


def is_wanted(request: Request, status: int) -> bool:
    """Whether the caller asked for pages of sites that answer with this status."""
    return status in allowed_statuses(_params_of(request))


def _params_of(request: Request) -> dict[str, str]:
    return dict(parse_qsl(request.target.path_and_query.partition("?")[2]))
