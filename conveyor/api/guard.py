"""The guard in front of Quart: turns away what Quart itself would fall over (SPEC 4.1).

Quart looks at the Host header before any handler of ours runs, and an error there would break the
connection instead of answering it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from conveyor.api import problems
from conveyor.api.flow import Event, Receive, throttled
from conveyor.domain.errors import InvalidArgument
from conveyor.usecases.env import Env

Send = Callable[[Event], Awaitable[None]]
Application = Callable[[Event, Receive, Send], Awaitable[None]]

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
        else:
            await inner(scope, throttled(scope, receive), send)

    return application


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
