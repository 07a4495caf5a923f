"""The endpoints for operators: health, readiness, metrics, quotas, the OpenAPI document and the
tree of actors (docs/operations.md, Endpoints for operators)."""

from __future__ import annotations

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from conveyor import __version__
from conveyor.api.route import Access, Query, Route
from conveyor.api.server.docs_page import MEDIA_TYPES, PAGE_HEADERS, read_file, render_page
from conveyor.api.server.problem import NotReady
from conveyor.api.server.request import RequestContext, Response, json_reply
from conveyor.domain.errors import NotFound
from conveyor.domain.quota import Quota
from conveyor.schemas.responses import HealthResponse, QuotaResponse, QuotasResponse


async def healthz(call: RequestContext) -> Response:
    return json_reply(HealthResponse("ok", __version__, call.env.config.build))


async def readyz(call: RequestContext) -> Response:
    if not call.api.is_ready():
        raise NotReady(
            "The process is starting up or shutting down, or its storage fails.", retry_after_s=2
        )
    return json_reply(HealthResponse("ready"))


async def metrics(call: RequestContext) -> Response:
    await call.api.run_figures.refresh(call.env, call.api.metrics.runs)
    return Response(200, generate_latest(call.api.metrics.registry), CONTENT_TYPE_PLAIN_0_0_4)


async def openapi(call: RequestContext) -> Response:
    return Response(200, call.api.document())


async def docs(call: RequestContext) -> Response:
    html = render_page(call.api.document(), base_url=call.base_url).encode()
    return Response(200, html, "text/html; charset=utf-8", dict(PAGE_HEADERS))


async def docs_file(call: RequestContext) -> Response:
    name = call.ids["file"]
    if name not in MEDIA_TYPES:
        raise NotFound("This path does not exist. See /docs.")
    return Response(200, read_file(name), MEDIA_TYPES[name])


async def actors(call: RequestContext) -> Response:
    """Shows the tree of actors, if the process enables it: it names runs of every caller."""
    if call.api.inspect is None:
        raise NotFound("This path does not exist. See /docs.")
    return Response(200, msgspec.json.encode(call.api.inspect()))


async def list_quotas(call: RequestContext) -> Response:
    """Returns the limits of this server, and the caller's use of those that are counted."""
    limits = call.api.requests.quotas
    use = await call.api.storage.count(call.caller)
    used: dict[Quota, int | None] = {
        Quota.LIVE_RUNS: use.live_runs,
        Quota.OPEN_JOBS: use.open_jobs,
        Quota.STORED_TASKS: use.tasks,
        Quota.STORED_BYTES: use.bytes,
        Quota.UPLOAD_SLOTS: await call.api.storage.count_slots(call.caller),
        Quota.STREAMS: call.api.requests.held_count(Quota.STREAMS, call.caller),
        Quota.AUDITS: call.api.requests.held_count(Quota.AUDITS, call.caller),
    }
    rows = [
        QuotaResponse(name=quota, limit=limits.get(quota), used=used.get(quota)) for quota in Quota
    ]
    return json_reply(QuotasResponse(rows))


ROUTES: tuple[Route, ...] = (
    Route(
        method="GET",
        path="/v1/quotas",
        name="listQuotas",
        tag="operations",
        summary="Show the quotas of this server and your use of them",
        description=(
            "Shows every quota of this server with its limit, and the caller's use of those that "
            "are counted."
        ),
        does=Query(list_quotas),
        answers={200: QuotasResponse},
    ),
    Route(
        method="GET",
        path="/healthz",
        name="getHealth",
        tag="operations",
        summary="Show whether the process is alive",
        description="Answers while the process is alive. It says nothing about its storage.",
        does=Query(healthz),
        answers={200: HealthResponse},
        access=Access.PUBLIC,
    ),
    Route(
        method="GET",
        path="/readyz",
        name="getReadiness",
        tag="operations",
        summary="Show whether the process is ready for requests",
        description=(
            "Answers 200 while the process accepts requests, and 503 while it starts, drains or "
            "has failing storage."
        ),
        does=Query(readyz),
        answers={200: HealthResponse},
        problems=(503,),
        access=Access.PUBLIC,
    ),
    Route(
        method="GET",
        path="/metrics",
        name="getMetrics",
        tag="operations",
        summary="Metrics in the Prometheus text format",
        description="Returns the metrics of this process in the text format of Prometheus.",
        does=Query(metrics),
        answers={200: "text/plain"},
        access=Access.PUBLIC,
    ),
    Route(
        method="GET",
        path="/openapi.json",
        name="getOpenApi",
        tag="operations",
        summary="This document",
        description="Returns the description of this API as OpenAPI 3.1.",
        does=Query(openapi),
        answers={200: "application/json"},
        access=Access.PUBLIC,
    ),
    Route(
        method="GET",
        path="/docs",
        name="getDocs",
        tag="operations",
        summary="This document, as a page",
        description="Shows the description of this API as a page that can send requests.",
        does=Query(docs),
        answers={200: "text/html"},
        access=Access.PUBLIC,
    ),
    Route(
        method="GET",
        path="/docs/{file}",
        name="getDocsFile",
        tag="operations",
        summary="The style sheet, the script or the icon of that page",
        description="Returns a file that the page at `/docs` loads.",
        does=Query(docs_file),
        answers={200: "*/*"},
        problems=(404,),
        access=Access.PUBLIC,
    ),
    Route(
        method="GET",
        path="/debug/actors",
        name="getActors",
        tag="operations",
        summary="Show the tree of actors, if the operator enables it",
        description=(
            "Shows the tree of actors with their restarts and mailboxes. Servers do not answer it "
            "unless the operator enables it."
        ),
        does=Query(actors),
        answers={200: "application/json"},
        problems=(404,),
        access=Access.PUBLIC,
    ),
)
