"""Tests the simulated clients: they use every route, and probe the data of other tenants."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import conveyor.simulation.clients
from conveyor.api.route import Access, Command, Route
from conveyor.api.server.app import ROUTES
from conveyor.simulation.backends.snapshot import Snapshot
from conveyor.simulation.checkers.tenancy import ids_of_other_callers_are_not_found
from conveyor.simulation.client_history import AcceptedRequest, Call, History
from conveyor.simulation.clients.actions import ACTIONS
from conveyor.simulation.clients.cross_tenant import BODIES, FOREIGN_ROUTES
from conveyor.simulation.invariant_monitor import StateChange
from conveyor.simulation.options import draw
from conveyor.simulation.profiles import CLIENT_PROFILES, without_internal_faults
from conveyor.simulation.simulator import simulate
from conveyor.simulation.trace.trace import Line

OURS, THEIRS = "01HF7YAT002XS0WYH6KZCNQBY8", "01HF7YAT002XS0WYH6KZCNQBY9"


@pytest.mark.parametrize(
    "route",
    [route for route in ROUTES if route.access is not Access.PUBLIC],
    ids=lambda route: route.name,
)
def test_simulated_clients_request_every_route(route: Route) -> None:
    package = Path(conveyor.simulation.clients.__file__).parent
    source = "".join(path.read_text() for path in package.glob("*.py"))

    last = route.path.rpartition("/")[2]
    # No world has a crawl, so only requests for the data of other tenants name one.
    is_of_a_crawl = "{crawl_id}" in route.path and route in FOREIGN_ROUTES
    is_an_id = last in {"{job_id}", "{run_id}", "{task_id}", "{export_id}"}
    assert is_of_a_crawl or is_an_id or last in source


@pytest.mark.parametrize("route", FOREIGN_ROUTES, ids=lambda route: route.name)
def test_a_request_for_foreign_data_has_a_body_if_its_route_needs_one(route: Route) -> None:
    takes_one = isinstance(route.does, Command) and route.does.payload is not None

    assert (route.name in BODIES) == takes_one


def test_every_action_that_a_temper_prefers_exists() -> None:
    names = {action.__name__ for action in ACTIONS}

    assert names >= {name for often in CLIENT_PROFILES.values() for name in often}


def test_the_service_accepts_the_lists_that_clients_upload() -> None:
    options = msgspec.structs.replace(
        without_internal_faults(draw(1, engine="memory", hours=20 / 3600)),
        client_profile="uploading",
        client_speed=10.0,
    )

    lines = simulate(options).lines

    uploads = {line.detail.split()[0] for line in lines if _is_upload(line)}
    answers = [line.detail.split()[:2] for line in lines if line.what == "was answered"]
    statuses = {status for number, status in answers if number in uploads}
    assert uploads
    assert statuses == {"200"}


def _is_upload(line: Line) -> bool:
    return line.what == "PUT" and "/upload?" in line.detail


def ask(job_id: str, status: int | None) -> Iterator[str]:
    history = History()
    for tenant, known in (("us", OURS), ("them", THEIRS)):
        history.accepted_requests[known] = AcceptedRequest(
            tenant=tenant, job_id=known, run_id=None, lines_count=1
        )
    nothing = Snapshot(at=0.0, now=0.0, rows={}, leases=[])
    call = Call(
        number=1,
        tenant="us",
        method="PUT",
        path=f"/v1/jobs/{job_id}/budget",
        key=None,
        body=b"",
        sent_at=0.0,
        status=status,
    )
    change = StateChange(nothing, nothing, [], history, lambda _: None, list)
    return ids_of_other_callers_are_not_found(change, call)


@pytest.mark.parametrize("status", [200, 204, 400, 409])
def test_any_answer_but_404_about_the_job_of_another_tenant_is_reported(status: int) -> None:
    assert [*ask(THEIRS, status)] == [f"call 1 of us was answered {status}, and not 404"]


@pytest.mark.parametrize(("job_id", "status"), [(THEIRS, 404), (THEIRS, None), (OURS, 200)])
def test_a_404_no_answer_and_the_tenants_own_job_are_accepted(
    job_id: str, status: int | None
) -> None:
    assert [*ask(job_id, status)] == []
