"""The guard in front of Quart: turns away what Quart itself would fall over (SPEC 4.1).

Quart looks at the Host header before any handler of ours runs, and an error there would break the
connection instead of answering it. And when a request is answered before all of it has arrived,
Hypercorn hangs up, Quart takes that for a client that left and cancels the hanging up: without the
shield below the connection would look alive and never answer again.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import trio

from conveyor.api import problems
from conveyor.api.flow import Event, Receive, throttled
from conveyor.domain.errors import InvalidArgument
from conveyor.usecases.env import Env

Send = Callable[[Event], Awaitable[None]]
Application = Callable[[Event, Receive, Send], Awaitable[None]]

# How long an early answer waits for the rest of its request, which nobody reads, and how long the
# connection stays behind it: closed at once, it could take the answer along.
PATIENCE_S = 0.1
LINGER_S = 1.0

_LABEL = rb"[A-Za-z0-9_-]{1,63}"
_HOST = re.compile(
    rb"(?:" + _LABEL + rb"(?:\." + _LABEL + rb")*\.?|\[[0-9A-Fa-f:.]{2,45}\])?(?::[0-9]{1,5})?\Z"
)


def guarded(inner: Application, env: Env) -> Application:
    async def application(scope: Event, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http" and not _is_addressed_well(scope):
            await _refuse(send, request_id=env.mint())
        elif scope["type"] == "http":
            exchange = _Exchange(receive, send)
            await inner(scope, throttled(scope, exchange.receive), exchange.send)
        else:
            await inner(scope, receive, send)

    return application


class _Exchange:
    """One request and its answer. An answer that comes early lets the rest of the request pass by;
    if there is too much of it, the connection ends with the answer, and says so."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._has_arrived = trio.Event()
        self._is_answering = False

    async def receive(self) -> Event:
        while True:
            event = await self._receive()
            is_more = event["type"] == "http.request" and event.get("more_body", False)
            if not is_more:
                self._has_arrived.set()
            if not (self._is_answering and is_more):
                return event

    async def send(self, event: Event) -> None:
        if event["type"] == "http.response.start":
            self._is_answering = True
            await self._wait_for_the_rest(PATIENCE_S)
            if not self._has_arrived.is_set():
                event = {**event, "headers": [*event["headers"], (b"connection", b"close")]}
        if event["type"] == "http.response.body" and not event.get("more_body", False):
            await self._wait_for_the_rest(LINGER_S)
            with trio.CancelScope(shield=True):
                await self._send(event)
        else:
            await self._send(event)

    async def _wait_for_the_rest(self, seconds: float) -> None:
        if not self._has_arrived.is_set():
            with trio.move_on_after(seconds):
                await self._has_arrived.wait()


def _is_addressed_well(scope: Event) -> bool:
    hosts = [value for name, value in scope["headers"] if name.lower() == b"host"]
    return bool(scope["path"]) and len(hosts) <= 1 and all(_HOST.match(host) for host in hosts)


async def _refuse(send: Send, *, request_id: str) -> None:
    refusal = InvalidArgument("The Host header does not name a host.")
    answered = problems.answer_for(refusal, request_id=request_id)
    headers = [
        (b"content-type", problems.MEDIA_TYPE.encode()),
        (b"content-length", str(len(answered.content)).encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"x-request-id", request_id.encode()),
    ]
    await send({"type": "http.response.start", "status": answered.status, "headers": headers})
    await send({"type": "http.response.body", "body": answered.content, "more_body": False})
