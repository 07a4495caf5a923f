"""The fetch API over HTTP: an ASGI application (docs/gateway.md, Answers).

`/v1/` takes calls; `/healthz`, `/readyz` and `/metrics` are for the operator. When a client closes
its connection, the server cancels the call, and with it the page in the browser.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import msgspec
import trio
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from conveyor import __version__
from conveyor.api.server.auth import KEY_CHARS_MAX, Authenticator
from conveyor.domain import limits
from conveyor.domain.errors import Refused, Unauthenticated
from conveyor.gateway.call import bad_parameter, call_from, query_of
from conveyor.gateway.errors import CallFailed, Fault
from conveyor.gateway.service import Answer, Service
from conveyor.http_server.connection import REFUSAL, Receive, Send
from conveyor.http_server.exchange import Event, HeadLimits
from conveyor.ports.gateway import OWN_PROBLEMS

log = logging.getLogger(__name__)

# All parameters, the URL and the headers of a call are in its head, and escaping can triple them.
HEAD_LIMITS = HeadLimits(head_bytes_max=160 * 1024, target_bytes_max=128 * 1024)
BODY_S_MAX = 30.0
# Headers of the page that are sent on as `Zr-...`.
_PAGE_HEADERS_MAX = 64
_PAGE_HEADERS_BYTES_MAX = 16 * 1024
_HOP_BY_HOP = frozenset({"connection", "content-length", "content-encoding", "transfer-encoding"})
_JSON = "application/json"


class Reply(msgspec.Struct, frozen=True):
    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes


@dataclass(frozen=True, slots=True)
class CallMetrics:
    calls: Counter
    under_way: Gauge


def make_call_metrics(registry: CollectorRegistry) -> CallMetrics:
    return CallMetrics(
        calls=Counter(
            "conveyor_fetch_calls",
            "Calls of the fetch API by code; `ok` is a page.",
            ["code"],
            registry=registry,
        ),
        under_way=Gauge(
            "conveyor_fetch_calls_open", "Calls that are under way now.", registry=registry
        ),
    )


class FetchApp:
    def __init__(
        self,
        service: Service,
        authenticator: Authenticator,
        *,
        new_id: Callable[[], str],
        is_ready: Callable[[], bool],
    ) -> None:
        self._service = service
        self._authenticator = authenticator
        self._new_id = new_id
        self._is_ready = is_ready
        self._registry = CollectorRegistry()
        metrics = make_call_metrics(self._registry)
        metrics.under_way.set_function(lambda: service.call_count)
        self._calls = metrics.calls

    async def startup(self) -> None:
        """The server calls it before the first request."""

    async def __call__(self, scope: Event, receive: Receive, send: Send) -> None:
        request_id = self._new_id()
        refusal: Refused | None = scope.get(REFUSAL)
        if refusal is not None:
            fault = Fault.INTERNAL if refusal.status >= 500 else Fault.BAD_PARAMETER
            reply = _problem(refusal.status, fault.code, refusal.title, refusal.detail)
        elif scope["path"] in {"/v1/", "/v1"}:
            reply = await self._serve(scope, receive, request_id)
        else:
            reply = self._monitor(scope["path"])
        await _send(send, reply, request_id, without_body=scope["method"] == "HEAD")

    async def _serve(self, scope: Event, receive: Receive, request_id: str) -> Reply:
        try:
            reply = await self._perform(scope, receive)
        except CallFailed as failed:
            fault = failed.fault
            self._calls.labels(fault.code).inc()
            fields = {"code": fault.code, "request_id": request_id, "cause": failed.detail}
            log.info("call failed", extra=fields)
            reply = _problem(fault.status, fault.code, fault.title, failed.detail, request_id)
            if failed.retry_after_s is not None:
                retry_after = ("Retry-After", str(failed.retry_after_s))
                reply = msgspec.structs.replace(reply, headers=[*reply.headers, retry_after])
            return reply
        self._calls.labels("ok").inc()
        return reply

    async def _perform(self, scope: Event, receive: Receive) -> Reply:
        query = query_of(scope["query_string"])
        partition = self._identify(query)
        headers = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
        ]
        with self._service.admit(partition):
            body = await _read_body(receive)
            call = call_from(
                scope["method"],
                query,
                headers,
                body,
                partition=partition,
                support=self._service.support,
            )
            answer = await _until_disconnect(receive, lambda: self._service.perform(call))
            limit = self._service.calls_max
            remaining = self._service.remaining(partition)
        concurrency = [
            ("Concurrency-Limit", str(limit)),
            ("Concurrency-Remaining", str(remaining)),
        ]
        return Reply(answer.status, [*_headers_of(answer), *concurrency], answer.body)

    def _identify(self, query: Mapping[str, str]) -> str:
        key = query.get("apikey", "")
        if not key.strip():
            raise CallFailed(Fault.NO_KEY, "Send the API key as `apikey`.")
        try:
            if len(key) > KEY_CHARS_MAX:
                raise Unauthenticated("too long")
            return str(self._authenticator.identify(key).caller)
        except Unauthenticated:
            raise CallFailed(Fault.UNKNOWN_KEY, "Check the API key.") from None

    def _monitor(self, path: str) -> Reply:
        if path == "/healthz":
            return _json(200, {"status": "ok", "version": __version__})
        if path == "/readyz":
            is_ready = self._is_ready()
            words = "ready" if is_ready else "draining"
            return _json(200 if is_ready else 503, {"status": words})
        if path == "/metrics":
            kind = ("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)
            return Reply(200, [kind], generate_latest(self._registry))
        return _problem(404, "REQS004", "Not found", "The fetch API is at /v1/.")


async def _read_body(receive: Receive) -> bytes:
    body = bytearray()
    with trio.move_on_after(BODY_S_MAX) as scope:
        while True:
            event = await receive()
            if event["type"] == "http.disconnect":
                raise trio.BrokenResourceError
            body += event.get("body", b"")
            if len(body) > limits.BODY_BYTES_MAX:
                raise CallFailed(Fault.TOO_LARGE, "the body of the request is too large")
            if not event.get("more_body", False):
                return bytes(body)
    assert scope.cancelled_caught
    raise bad_parameter("The body of the request did not arrive in time.")


async def _until_disconnect(receive: Receive, work: Callable[[], Awaitable[Answer]]) -> Answer:
    """Performs the work, and cancels it when the client closes the connection."""
    answer: Answer | None = None
    failure: CallFailed | None = None
    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            nursery.cancel_scope.cancel()

        nursery.start_soon(watch)
        try:
            answer = await work()
        except CallFailed as error:
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    if answer is None:
        _abandon()
    return answer


def _abandon() -> NoReturn:
    raise trio.BrokenResourceError("the client is gone")


def _headers_of(answer: Answer) -> list[tuple[str, str]]:
    page = answer.page
    headers = [
        ("Content-Type", answer.content_type),
        ("X-Content-Type-Options", "nosniff"),
        # A page costs nothing but the machine.
        ("X-Request-Cost", "0"),
        ("X-Request-Credits", "0"),
        ("Zr-Final-Url", page.url),
        ("Zr-Status", str(page.status)),
    ]
    size_bytes = 0
    for name, value in page.site_headers[:_PAGE_HEADERS_MAX]:
        size_bytes += len(name) + len(value)
        is_plain = value.isascii() and value.isprintable() and name.isascii()
        if name not in _HOP_BY_HOP and is_plain and size_bytes <= _PAGE_HEADERS_BYTES_MAX:
            headers.append((f"Zr-{name.title()}", value))
    return headers


def _problem(status: int, code: str, title: str, detail: str, instance: str = "") -> Reply:
    document = {
        "code": code,
        "detail": detail,
        "instance": f"/v1/{instance}",
        "status": status,
        "title": f"{title} ({code})",
        "type": f"{OWN_PROBLEMS}{code}",
    }
    return _json(status, document, kind="application/problem+json")


def _json(status: int, document: Mapping[str, object], kind: str = _JSON) -> Reply:
    return Reply(status, [("Content-Type", kind)], msgspec.json.encode(document))


async def _send(send: Send, reply: Reply, request_id: str, *, without_body: bool) -> None:
    headers = [
        *reply.headers,
        ("Content-Length", str(len(reply.body))),
        ("Cache-Control", "no-store"),
        ("X-Request-Id", request_id),
    ]
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    await send({"type": "http.response.start", "status": reply.status, "headers": encoded})
    body = b"" if without_body else reply.body
    await send({"type": "http.response.body", "body": body, "more_body": False})
