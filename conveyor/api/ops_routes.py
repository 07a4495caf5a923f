"""The routes for those who run the service (docs/operations.md, Endpoints for operators)."""

from __future__ import annotations

from conveyor.api import ops, quotas
from conveyor.api.route import Access, Reads, Route
from conveyor.wire import responses as shapes

OPS_ROUTES: tuple[Route, ...] = (
    Route(
        method="GET",
        path="/v1/quotas",
        name="listQuotas",
        tag="operations",
        summary="The quotas of this server, and what of them you have in use",
        does=Reads(quotas.list_quotas),
        answers={200: shapes.QuotasResponse},
    ),
    Route(
        method="GET",
        path="/healthz",
        name="getHealth",
        tag="operations",
        summary="Whether the process is alive",
        does=Reads(ops.healthz),
        answers={200: shapes.HealthResponse},
        access=Access.PUBLIC,
    ),
    Route(
        method="GET",
        path="/readyz",
        name="getReadiness",
        tag="operations",
        summary="Whether the process wants traffic",
        does=Reads(ops.readyz),
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
        does=Reads(ops.metrics),
        answers={200: "text/plain"},
        access=Access.PUBLIC,
    ),
    Route(
        method="GET",
        path="/openapi.json",
        name="getOpenApi",
        tag="operations",
        summary="This document",
        does=Reads(ops.openapi),
        answers={200: "application/json"},
        access=Access.PUBLIC,
    ),
    Route(
        method="GET",
        path="/docs",
        name="getDocs",
        tag="operations",
        summary="This document, as a page",
        does=Reads(ops.docs),
        answers={200: "text/html"},
        access=Access.PUBLIC,
    ),
    Route(
        method="GET",
        path="/debug/actors",
        name="getActors",
        tag="operations",
        summary="The live supervision tree, where the operator shows it",
        does=Reads(ops.actors),
        answers={200: "application/json"},
        problems=(404,),
        access=Access.PUBLIC,
    ),
)
