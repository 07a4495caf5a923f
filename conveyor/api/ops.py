"""For operators: health, readiness, metrics, the document and the live tree
(docs/operations.md, Endpoints for operators)."""

from __future__ import annotations

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from conveyor.api.call import Call, Reply, json_reply
from conveyor.api.docs import page_of
from conveyor.api.problems import NotReady
from conveyor.domain.errors import NotFound
from conveyor.wire.responses import HealthResponse

# The page is one file: nothing is loaded, run or framed.
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


async def healthz(call: Call) -> Reply:
    return json_reply(HealthResponse("ok"))


async def readyz(call: Call) -> Reply:
    if not call.api.is_ready():
        raise NotReady(
            "The process is starting up or shutting down, or its storage fails.", retry_after_s=2
        )
    return json_reply(HealthResponse("ready"))


async def metrics(call: Call) -> Reply:
    return Reply(200, generate_latest(call.api.metrics.registry), CONTENT_TYPE_PLAIN_0_0_4)


async def openapi(call: Call) -> Reply:
    return Reply(200, call.api.document)


async def docs(call: Call) -> Reply:
    html = page_of(call.api.document).encode()
    return Reply(200, html, "text/html; charset=utf-8", dict(PAGE_HEADERS))


async def actors(call: Call) -> Reply:
    """Only where the composition root chose to show it: it names runs of every caller."""
    if call.api.inspect is None:
        raise NotFound("There is nothing at this address.")
    return Reply(200, msgspec.json.encode(call.api.inspect()))
