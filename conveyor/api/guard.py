"""The guard in front of Quart: answers what Quart must not see (docs/api.md, Conventions).

Quart reads the Host header before any handler of ours runs, and an error there would break the
connection instead of answering it. Requests that the server could not read come here too, so that
every refusal has one shape, one log line and one metric.
"""

from __future__ import annotations

import logging
import re

from conveyor.api import problems
from conveyor.domain.errors import InvalidArgument, Refused
from conveyor.http1.connection import REFUSAL, Application, Receive, Send
from conveyor.http1.exchange import Event
from conveyor.telemetry import Metrics
from conveyor.usecases.env import Env

log = logging.getLogger(__name__)

_LABEL = rb"[A-Za-z0-9_-]{1,63}"
_HOST = re.compile(
    rb"(?:" + _LABEL + rb"(?:\." + _LABEL + rb")*\.?|\[[0-9A-Fa-f:.]{2,45}\])?(?::[0-9]{1,5})?\Z"
)


def guarded(inner: Application, env: Env, metrics: Metrics) -> Application:
    async def application(scope: Event, receive: Receive, send: Send) -> None:
        refusal = _find_refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await inner(scope, receive, send)
            return
        request_id = env.mint()
        answered = problems.answer_for(refusal, request_id=request_id)
        status = str(answered.status)
        metrics.http_requests.labels("OTHER", "none", status).inc()
        fields = {"code": refusal.code, "status": answered.status, "request_id": request_id}
        log.info("request refused", extra=fields)
        await _send(send, answered, request_id=request_id)

    return application


def _find_refusal(scope: Event) -> Refused | None:
    refusal: Refused | None = scope.get(REFUSAL)
    if refusal is not None:
        return refusal
    hosts = [value for name, value in scope["headers"] if name.lower() == b"host"]
    is_addressed = bool(scope["path"]) and len(hosts) <= 1 and all(map(_HOST.match, hosts))
    return None if is_addressed else InvalidArgument("The Host header does not name a host.")


async def _send(send: Send, answered: problems.Answered, *, request_id: str) -> None:
    headers = {
        "Content-Type": problems.MEDIA_TYPE,
        "Content-Length": str(len(answered.content)),
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "X-Request-ID": request_id,
        **answered.headers,
    }
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": answered.status, "headers": encoded})
    await send({"type": "http.response.body", "body": answered.content, "more_body": False})
