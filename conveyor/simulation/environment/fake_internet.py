"""A model of the internet: sites, the scraping gateway and webhook receivers, in place of the
connection pool.

The real gateways and the real notifier run on top of it: `fetch` returns, raises and takes as long
as the pool would.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from random import Random
from typing import Any, NoReturn

import trio

from conveyor.domain import limits
from conveyor.domain.submit.target import Target, TargetPolicy
from conveyor.http_client.errors import (
    BodyTooLarge,
    ConnectFailed,
    ConnectionLost,
    FetchFailed,
    OutOfResources,
    TimedOut,
    TlsFailed,
)
from conveyor.http_client.exchange import Request, Response
from conveyor.simulation.client_history import CURRENT_FETCH, Delivery, Fetch, History
from conveyor.simulation.environment.gateway import GatewayModel, is_wanted, url_of
from conveyor.simulation.faults.fault_injector import FaultInjector
from conveyor.simulation.faults.faults import Fault, Faults
from conveyor.simulation.invariant_monitor import InvariantMonitor

GATEWAY_HOST = "gateway.example"
RECEIVER_DOMAIN = ".hooks.example"
KILLING_PATH = b"poison"
"""A URL that contains this kills the process that fetches it."""
TAR_PIT = "tar-pit"
"""A URL that contains this never gets an answer while faults are on."""
CALM_SITE = "calm.example"
"""A site that answers every request after the same time, so that fairness can be measured."""
CALM_SITE_S = 0.2
LATE_ANSWER = "late-answer"
"""A URL that contains this gets its answer twice: the second one arrives on the next request of the
connection."""
# Once faults are over, sites answer quickly, so that runs end soon.
CALM_THINK_S = 0.1
METADATA_HOST = "169.254.169.254"
"""The metadata service of clouds. A receiver redirects to it; no request may ever reach it."""

_TRAP = f"http://{METADATA_HOST}/latest/meta-data/".encode()
_ERRORS: dict[Fault, Callable[[], FetchFailed]] = {
    Fault.SITE_RESET: lambda: ConnectionLost("the peer went away"),
    Fault.SITE_WRONG_LENGTH: lambda: ConnectionLost("the body ended early"),
    Fault.SITE_TOO_LARGE: lambda: BodyTooLarge("the body is too large"),
    Fault.SITE_ENDLESS: lambda: BodyTooLarge("the body has no end"),
    Fault.SITE_TLS_FAILED: lambda: TlsFailed("the handshake failed", is_untrusted=True),
    Fault.RECEIVER_RESET: lambda: ConnectFailed("no address took the connection"),
}
_STATUSES: dict[Fault, int] = {
    Fault.SITE_NOT_FOUND: 404,
    Fault.SITE_BLOCKED: 403,
    Fault.SITE_FAILED: 503,
    Fault.SITE_RATE_LIMITED: 429,
    Fault.SITE_REDIRECTED: 302,
    Fault.ACCOUNT_SPENT: 402,
    Fault.RECEIVER_FAILED: 500,
    Fault.RECEIVER_RATE_LIMITED: 429,
    Fault.RECEIVER_REDIRECTED: 302,
    Fault.RECEIVER_TO_METADATA: 302,
    Fault.RECEIVER_TOO_LARGE: 204,
    Fault.RECEIVER_GONE: 410,
}
_GATEWAY_ANSWERS: dict[int, tuple[int, bytes]] = {
    404: (404, b'{"code":"RESP002"}'),
    **dict.fromkeys((302, 403, 429, 503), (422, b'{"code":"RESP001"}')),
}
"""The status and body with which the gateway reports the answer of a site."""
_SITE_FAULTS = (
    Fault.SITE_NOT_FOUND,
    Fault.SITE_BLOCKED,
    Fault.SITE_FAILED,
    Fault.SITE_RATE_LIMITED,
    Fault.SITE_HUNG,
    Fault.SITE_DRIPPED,
    Fault.SITE_RESET,
    Fault.SITE_WRONG_LENGTH,
    Fault.SITE_EMPTY,
    Fault.SITE_TOO_LARGE,
    Fault.SITE_REDIRECTED,
    Fault.SITE_TLS_FAILED,
    Fault.SITE_ENDLESS,
)
_RECEIVER_FAULTS = (
    Fault.RECEIVER_FAILED,
    Fault.RECEIVER_HUNG,
    Fault.RECEIVER_RESET,
    Fault.RECEIVER_REDIRECTED,
    Fault.RECEIVER_RATE_LIMITED,
    Fault.RECEIVER_GONE,
    Fault.RECEIVER_TO_METADATA,
    Fault.RECEIVER_DRIPPED,
    Fault.RECEIVER_TOO_LARGE,
)


@dataclass(slots=True, kw_only=True)
class FakeInternet:
    """The internet as one process sees it. A dead process gets no answer."""

    injector: FaultInjector
    faults: Faults
    random: Random
    think_s: float
    history: History
    monitor: InvariantMonitor
    policy: TargetPolicy
    gateway: GatewayModel
    late: dict[tuple[str, Any], Response] = field(default_factory=dict)

    async def resolve(self, target: Target, partition: str = "") -> tuple[str, ...]:
        await self._delay(0.01)
        return ("192.0.2.1",)

    async def fetch(self, request: Request) -> Response:
        """Does what HttpPool.fetch does."""
        assert request.target.host != METADATA_HOST, "a request followed the redirect of a receiver"
        if self.faults.occurs(Fault.OUT_OF_RESOURCES):
            raise OutOfResources("this process has no descriptor left")
        with trio.move_on_after(request.deadline_s):
            if request.target.host.endswith(RECEIVER_DOMAIN):
                return await self._receive(request)
            if request.target.host == GATEWAY_HOST:
                return await self._call_gateway(request)
            return self._with_late_answers(request, await self._visit(request, CURRENT_FETCH.get()))
        self.injector.check()
        raise TimedOut("no complete answer before the deadline")

    def _with_late_answers(self, request: Request, response: Response) -> Response:
        """Returns the late answer of this connection, if it has one. A real connection is reused
        only within a partition, so `origin` has the partition: a request gets the late answer of
        another caller only if they share one."""
        origin = (request.partition, request.target.origin)
        late = self.late.pop(origin, None)
        is_page = response.status == 200
        if LATE_ANSWER in request.target.path_and_query and request.body and is_page:
            self.late[origin] = response
        return late if late is not None and is_page else response

    async def _call_gateway(self, request: Request) -> Response:
        """The gateway refuses the call, or fetches the page and bills it."""
        fetch = CURRENT_FETCH.get()
        await self._delay(self.random.uniform(0.0, 0.05))
        try:
            refusal = self.gateway.refuse(request)
        except ConnectFailed:
            _note_outage(fetch)
            raise
        if refusal is not None:
            _note_outage(fetch)
            return refusal
        if fetch is not None:
            fetch.is_at_gateway = True
        response = await self._visit(request, fetch)
        is_page = response.status == 200
        if response.status in _GATEWAY_ANSWERS:
            if not is_wanted(request, response.status):
                status, body = _GATEWAY_ANSWERS[response.status]
                return Response(status, self.gateway.page_headers(request), body)
            is_page, page = True, _page(request, fetch, len(self.history.fetches))
            response = Response(response.status, page.headers, page.body)
        if is_page and fetch is not None:
            fetch.credits_billed += fetch.price_credits
        headers = (*response.headers, *self.gateway.page_headers(request))
        return Response(response.status, headers, response.body)

    async def _visit(self, request: Request, fetch: Fetch | None) -> Response:
        if KILLING_PATH.decode() in request.target.path_and_query:
            self.injector.kill(Fault.KILLED_BEFORE)
            self.injector.check()
        fault = self._find_fault(request.target)
        is_paid = request.target.host == GATEWAY_HOST and not _is_calm(request.target)
        if is_paid and self.faults.occurs(Fault.ACCOUNT_SPENT):
            fault = Fault.ACCOUNT_SPENT
            self.history.spent_count += 1
        if fault is not None and fetch is not None:
            fetch.site_faults += 1
        think_s = CALM_THINK_S if self.faults.is_calm else self.think_s
        pause_s = self.random.uniform(0.0, 2.0 * think_s)
        if _is_calm(request.target):
            pause_s = CALM_SITE_S
        hangs = fault in {Fault.SITE_HUNG, Fault.SITE_DRIPPED, Fault.SITE_ENDLESS}
        is_gateway = request.target.host == GATEWAY_HOST
        busy_s = request.deadline_s if hangs else pause_s
        with self.gateway.occupy(request, busy_s) if is_gateway else nullcontext():
            await self._delay(pause_s)
            return await self._respond(request, fetch, fault)

    async def _respond(
        self, request: Request, fetch: Fetch | None, fault: Fault | None
    ) -> Response:
        """The answer of the site, or its failure."""
        if fault is None or fault in {Fault.SITE_EMPTY, Fault.SITE_DRIPPED}:
            if fault is Fault.SITE_DRIPPED:
                await self._delay(self.random.uniform(10.0, 2.0 * limits.SCRAPE_DEADLINE_S))
            visit = 0 if fault is Fault.SITE_EMPTY else len(self.history.fetches)
            return _page(request, fetch, visit)
        if fault is Fault.SITE_ENDLESS:
            await self._delay(self.random.uniform(0.0, 2.0 * limits.SCRAPE_DEADLINE_S))
        return await self._fail(fault)

    async def _receive(self, request: Request) -> Response:
        fault = self._draw_fault(_RECEIVER_FAULTS)
        await self._delay(self.random.uniform(0.0, 0.5))
        self._note_delivery(request, 204 if fault is None else _STATUSES.get(fault))
        if fault is Fault.RECEIVER_DRIPPED:
            await self._delay(self.random.uniform(0.0, 2.0 * request.deadline_s))
            self._note_delivery(request, 204)
        if fault is Fault.RECEIVER_TOO_LARGE and request.wants_body(204):
            raise BodyTooLarge("the answer is too large")
        if fault is None or fault is Fault.RECEIVER_DRIPPED:
            return Response(204, (), b"")
        return await self._fail(fault)

    def _note_delivery(self, request: Request, status: int | None) -> None:
        headers = {name.lower(): value for name, value in request.headers}
        delivery = Delivery(
            event_id=headers["webhook-id"],
            url=f"https://{request.target.host}{request.target.path_and_query}",
            body=request.body or b"",
            headers=headers,
            at=trio.current_time(),
            status=status,
        )
        self.history.deliveries.append(delivery)
        self.injector.trace.note(
            self.injector.name, "delivered", f"{delivery.event_id} -> {status}"
        )
        self.monitor.on_delivery(delivery)

    async def _fail(self, fault: Fault) -> Response:
        if fault in _ERRORS:
            raise _ERRORS[fault]()
        if fault in {Fault.SITE_HUNG, Fault.RECEIVER_HUNG}:
            await self._hang()
        status = _STATUSES[fault]
        headers: list[tuple[bytes, bytes]] = []
        if status == 429:
            headers.append((b"retry-after", b"%d" % self.random.choice((1, 30, 120))))
        if status == 302:
            is_trap = fault is Fault.RECEIVER_TO_METADATA
            headers.append((b"location", _TRAP if is_trap else b"https://elsewhere.example/again"))
        return Response(status, tuple(headers), b"")

    async def _hang(self) -> NoReturn:
        await trio.sleep_forever()
        raise AssertionError

    async def _delay(self, seconds: float) -> None:
        await trio.sleep(seconds)
        self.injector.check()

    def _find_fault(self, target: Target) -> Fault | None:
        if _is_calm(target):
            return None
        if TAR_PIT in target.path_and_query and not self.faults.is_calm:
            self.faults.count(Fault.TAR_PITS)
            return Fault.SITE_HUNG
        return self._draw_fault(_SITE_FAULTS)

    def _draw_fault(self, faults: tuple[Fault, ...]) -> Fault | None:
        for fault in faults:
            if self.faults.occurs(fault):
                return fault
        return None


def _is_calm(target: Target) -> bool:
    return target.host == CALM_SITE or CALM_SITE in target.path_and_query


def _note_outage(fetch: Fetch | None) -> None:
    if fetch is not None:
        fetch.outage_faults += 1


def _page(request: Request, fetch: Fetch | None, visit: int) -> Response:
    """A page that differs on every visit, also in length; empty if `visit` is 0. Its first line
    names the request that it answers: the task, the claim and the URL."""
    is_paid = request.target.host == GATEWAY_HOST
    origin = f"{request.target.scheme}://{request.target.host}"
    url = url_of(request) if is_paid else f"{origin}{request.target.path_and_query}"
    marker = f"{'nobody' if fetch is None else fetch.identity} {url}\n".encode()
    digest = hashlib.sha256(f"{request.target.path_and_query} {visit}".encode()).digest()
    body = marker + digest * (1 + digest[0] % 64) if visit else b""
    return Response(200, ((b"content-type", b"text/html"),), body)
