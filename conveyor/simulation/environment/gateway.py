"""A model of a scraping gateway: its plan, its outages, its headers and its bill
(docs/engines.md, Gateways; docs/simulator.md).

The gateway bills every page that it hands out. A call occupies its plan from the request until the
gateway is done with it, whether or not the caller still waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from urllib.parse import parse_qs

import trio

from conveyor.http_client.errors import ConnectFailed
from conveyor.http_client.request import Request, Response
from conveyor.simulation.client_history import GatewayRefusal, History
from conveyor.simulation.faults.faults import Fault, Faults

Headers = tuple[tuple[bytes, bytes], ...]

UNREACHABLE, FAILING = Fault.GATEWAY_UNREACHABLE, Fault.GATEWAY_FAILING
OUTAGES = (UNREACHABLE, FAILING)

_FALSE = (b"0", b"-1", b"1", b"999999999999", b"99999999999999999999", b"many", b"")
_LIE_RATE = 0.3


@dataclass(slots=True, kw_only=True)
class GatewayModel:
    """One gateway for all processes. `outage` is how it fails everybody at the moment."""

    plan: int
    lies: bool
    random: Random
    faults: Faults
    history: History
    outage: Fault | None = None
    _busy_until: dict[str, list[float]] = field(default_factory=dict)

    def refuse(self, request: Request) -> Response | None:
        """What the gateway answers instead of a page; None if it takes the call."""
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

    def occupy(self, request: Request, seconds: float) -> None:
        """The call occupies the plan of its key for so long."""
        until = trio.current_time() + seconds
        self._busy_until.setdefault(key_of(request), []).append(until)

    def page_headers(self, request: Request) -> Headers:
        return self._headers(key_of(request))

    def _busy_count(self, key: str) -> int:
        now = trio.current_time()
        busy = [until for until in self._busy_until.get(key, []) if until > now]
        self._busy_until[key] = busy
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
    """The API key that a call to the gateway carries."""
    query = request.target.path_and_query.partition("?")[2]
    return parse_qs(query).get("apikey", [""])[0]


def url_of(request: Request) -> str:
    """The page that a call to the gateway asks for."""
    query = request.target.path_and_query.partition("?")[2]
    return parse_qs(query).get("url", [""])[0]
