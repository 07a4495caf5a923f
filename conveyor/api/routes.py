"""The route table: what the application registers, and what the OpenAPI document describes."""

from __future__ import annotations

from conveyor.api.job_routes import JOB_ROUTES
from conveyor.api.ops_routes import OPS_ROUTES
from conveyor.api.route import Route
from conveyor.api.run_routes import RUN_ROUTES
from conveyor.api.webhook_routes import WEBHOOK_ROUTES

ROUTES: tuple[Route, ...] = (*JOB_ROUTES, *RUN_ROUTES, *WEBHOOK_ROUTES, *OPS_ROUTES)
