"""The endpoints for operators, and the OpenAPI document as one HTML page.

The page has no script and loads nothing, so that it works offline and under a strict policy.
"""

from __future__ import annotations

from html import escape
from typing import Any

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from conveyor import __version__
from conveyor.api.routes.route import Access, Query, Route
from conveyor.api.server import quota
from conveyor.api.server.problem import NotReady
from conveyor.api.server.request_context import RequestContext, Response, json_reply
from conveyor.domain.errors import NotFound
from conveyor.schemas import responses as shapes
from conveyor.schemas.responses import HealthResponse

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem;
       color: #1b1f24; background: #fff; }
@media (prefers-color-scheme: dark) { body { color: #e6e6e6; background: #16181b; }
       code, pre, summary { background: #22262b !important; } a { color: #8ab4f8; } }
h2 { margin-top: 2.5rem; }
code, pre { font: 14px/1.5 ui-monospace, monospace; background: #f3f4f6; border-radius: 4px; }
code { padding: .1em .3em; }
pre { padding: .8rem; overflow-x: auto; }
details { margin: .4rem 0; }
summary { cursor: pointer; padding: .4rem .6rem; background: #f3f4f6; border-radius: 4px; }
summary b { display: inline-block; width: 4.5rem; }
summary span { opacity: .75; }
"""


def page_of(document: bytes) -> str:
    """Renders every operation of an OpenAPI document and every schema that it names."""
    spec: dict[str, Any] = msgspec.json.decode(document)
    title = escape(f"{spec['info']['title']} {spec['info']['version']}")
    groups: dict[str, list[str]] = {}
    for path, methods in spec["paths"].items():
        for method, operation in methods.items():
            groups.setdefault(operation["tags"][0], []).append(_operation(method, path, operation))
    sections = [f"<h2>{escape(tag)}</h2>{''.join(items)}" for tag, items in groups.items()]
    shapes = [_shape(name, shape) for name, shape in spec["components"]["schemas"].items()]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>{title}</h1><p>{escape(spec['info']['description'])}</p>"
        f'<p>As data: <a href="/openapi.json">/openapi.json</a></p>'
        f"{''.join(sections)}<h2>Shapes</h2>{''.join(shapes)}</body></html>"
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    query = [
        f"<li><code>{escape(each['name'])}</code> {escape(each.get('description', ''))}</li>"
        for each in operation.get("parameters", ())
        if each.get("in") == "query"
    ]
    answers = [
        f"<li><code>{escape(status)}</code> {escape(_answer(answer))}</li>"
        for status, answer in operation["responses"].items()
    ]
    asked = _names(operation.get("requestBody", {}).get("content", {}))
    return (
        f"<details><summary><b>{escape(method.upper())}</b> <code>{escape(path)}</code> "
        f"<span>{escape(operation['summary'])}</span></summary>"
        + (f"<p>Body: {escape(asked)}</p>" if asked else "")
        + (f"<p>Query</p><ul>{''.join(query)}</ul>" if query else "")
        + f"<p>Answers</p><ul>{''.join(answers)}</ul></details>"
    )


def _answer(answer: dict[str, Any]) -> str:
    named = _names(answer.get("content", {}))
    return f"{answer['description']} {named}".strip()


def _names(content: dict[str, Any]) -> str:
    references = [media["schema"].get("$ref", "") for media in content.values()]
    return ", ".join(reference.rpartition("/")[2] for reference in references if reference)


def _shape(name: str, shape: dict[str, Any]) -> str:
    text = msgspec.json.format(msgspec.json.encode(shape), indent=2).decode()
    return (
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code> '
        f"<span>{escape(shape.get('description', ''))}</span></summary>"
        f"<pre>{escape(text)}</pre></details>"
    )


# Handlers for operators: health, readiness, metrics, the document and the tree of actors
# (docs/operations.md, Endpoints for operators).


# The page is one file. The browser must not load, run or frame anything.
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


async def healthz(call: RequestContext) -> Response:
    return json_reply(HealthResponse("ok", __version__, call.env.policy.build))


async def readyz(call: RequestContext) -> Response:
    if not call.api.is_ready():
        raise NotReady(
            "The process is starting up or shutting down, or its storage fails.", retry_after_s=2
        )
    return json_reply(HealthResponse("ready"))


async def metrics(call: RequestContext) -> Response:
    return Response(200, generate_latest(call.api.metrics.registry), CONTENT_TYPE_PLAIN_0_0_4)


async def openapi(call: RequestContext) -> Response:
    return Response(200, call.api.document)


async def docs(call: RequestContext) -> Response:
    html = page_of(call.api.document).encode()
    return Response(200, html, "text/html; charset=utf-8", dict(PAGE_HEADERS))


async def actors(call: RequestContext) -> Response:
    """Shows the tree of actors, if the process enables it: it names runs of every caller."""
    if call.api.inspect is None:
        raise NotFound("There is nothing at this address.")
    return Response(200, msgspec.json.encode(call.api.inspect()))


# The routes for operators (docs/operations.md, Endpoints for operators).


OPS_ROUTES: tuple[Route, ...] = (
    Route(
        method="GET",
        path="/v1/quotas",
        name="listQuotas",
        tag="operations",
        summary="The quotas of this server, and what of them you have in use",
        does=Query(quota.list_quotas),
        answers={200: shapes.QuotasResponse},
    ),
    Route(
        method="GET",
        path="/healthz",
        name="getHealth",
        tag="operations",
        summary="Whether the process is alive",
        does=Query(healthz),
        answers={200: shapes.HealthResponse},
        access=Access.PUBLIC,
    ),
    Route(
        method="GET",
        path="/readyz",
        name="getReadiness",
        tag="operations",
        summary="Whether the process wants traffic",
        does=Query(readyz),
        answers={200: shapes.HealthResponse},
        problems=(503,),
        access=Access.PUBLIC,
    ),
    Route(
        method="GET",
        path="/metrics",
        name="getMetrics",
        tag="operations",
        summary="Metrics in the Prometheus text format",
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
        does=Query(docs),
        answers={200: "text/html"},
        access=Access.PUBLIC,
    ),
    Route(
        method="GET",
        path="/debug/actors",
        name="getActors",
        tag="operations",
        summary="The live supervision tree, where the operator shows it",
        does=Query(actors),
        answers={200: "application/json"},
        problems=(404,),
        access=Access.PUBLIC,
    ),
)
