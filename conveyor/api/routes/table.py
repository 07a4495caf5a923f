"""The route table. The application registers it, and the OpenAPI document describes it."""

from __future__ import annotations

from conveyor.api.routes.jobs import JOB_ROUTES
from conveyor.api.routes.operations import OPS_ROUTES
from conveyor.api.routes.route import Route
from conveyor.api.routes.runs import RUN_ROUTES
from conveyor.api.routes.webhooks import WEBHOOK_ROUTES

ROUTES: tuple[Route, ...] = (*JOB_ROUTES, *RUN_ROUTES, *WEBHOOK_ROUTES, *OPS_ROUTES)
