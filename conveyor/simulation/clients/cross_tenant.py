"""Requests for objects of another caller, on every route that takes an id (I44)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from conveyor.api.route import Route
from conveyor.api.server.app import ROUTES
from conveyor.simulation.client_history import AcceptedRequest
from conveyor.simulation.clients.client import Client

AT_ONCE = 4

# Ids of the right form that name nothing.
_NO_TASK = "0" * 32
_NOTHING = "0" * 26
BODIES: Mapping[str, Any] = {
    "addTasks": {"tasks": [{"url": "https://site1.example/"}]},
    "updateJobSchedule": {"rate": {"every": 1, "unit": "minute"}},
    "updateScheduleState": {"schedule_state": "paused"},
    "setJobBudget": {"credits": 5},
    "setJobHostLimits": {"concurrency": 2},
    "putJobWebhook": {"url": "https://receiver.example/", "signature": False},
    "startResultsExport": {"destination": {"url": "https://receiver.example/file"}},
}
_PATH_PARAMETER = re.compile(r"\{(\w+)\}")
FOREIGN_ROUTES = [
    route for route in ROUTES if "{job_id}" in route.path or "{crawl_id}" in route.path
]


async def request_objects_of_others(client: Client) -> None:
    """Requests some routes with ids of another caller, which this client was never told."""
    accepted_requests = client.sim.history.accepted_requests.values()
    others = [accepted for accepted in accepted_requests if accepted.tenant != client.name]
    if others:
        other = client.random.choice(others)
        for route in client.random.sample(FOREIGN_ROUTES, AT_ONCE):
            await client.once(route.method, _path(client, route, other), BODIES.get(route.name))


def _path(client: Client, route: Route, other: AcceptedRequest) -> str:
    fetched = (
        fetch.task_id for fetch in client.sim.history.fetches if fetch.run_id == other.run_id
    )
    task_id = next(fetched, _NO_TASK)
    ids = {
        "job_id": other.job_id,
        "run_id": other.run_id or _NOTHING,
        "task_id": task_id,
        # The id of a crawl is that of its job, and the id of a content is that of its task.
        "crawl_id": other.job_id,
        "content_id": task_id,
    }
    return _PATH_PARAMETER.sub(lambda parameter: ids.get(parameter[1], _NOTHING), route.path)
