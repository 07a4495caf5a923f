"""Clients do everything that the API offers, and are kept from what is another's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import conveyor.simulation.clients
from conveyor.api.route import Access, Command, Route
from conveyor.api.server.app import ROUTES
from conveyor.simulation.backends.snapshot import Snapshot
from conveyor.simulation.checkers.tenancy import what_is_anothers_is_not_found
from conveyor.simulation.client_history import AcceptedRequest, Call, History
from conveyor.simulation.clients.actions import ACTIONS
from conveyor.simulation.clients.cross_tenant import BODIES, FOREIGN_ROUTES
from conveyor.simulation.invariant_monitor import StateChange
from conveyor.simulation.options import draw
from conveyor.simulation.profiles import TEMPERS, spared
from conveyor.simulation.simulator import simulate
from conveyor.simulation.trace.trace import Line

OURS, THEIRS = "01HF7YAT002XS0WYH6KZCNQBY8", "01HF7YAT002XS0WYH6KZCNQBY9"


@pytest.mark.parametrize(
    "route",
    [route for route in ROUTES if route.access is not Access.PUBLIC],
    ids=lambda route: route.name,
)
def test_no_route_is_left_unmentioned_by_clients(route: Route) -> None:
    package = Path(conveyor.simulation.clients.__file__).parent
    source = "".join(path.read_text() for path in package.glob("*.py"))

    last = route.path.rpartition("/")[2]
    # No world has a crawl yet, so only those who trespass ask for one.
    is_of_a_crawl = "{crawl_id}" in route.path and route in FOREIGN_ROUTES
    is_an_id = last in {"{job_id}", "{run_id}", "{task_id}", "{export_id}"}
    assert is_of_a_crawl or is_an_id or last in source


@pytest.mark.parametrize("route", FOREIGN_ROUTES, ids=lambda route: route.name)
def test_who_trespasses_sends_a_body_wherever_one_is_asked_for(route: Route) -> None:
    takes_one = isinstance(route.does, Command) and route.does.payload is not None

    assert (route.name in BODIES) == takes_one


def test_whatever_a_temper_does_more_often_is_an_action() -> None:
    names = {action.__name__ for action in ACTIONS}

    assert names >= {name for often in TEMPERS.values() for name in often}


def test_clients_upload_lists_that_the_service_takes() -> None:
    options = msgspec.structs.replace(
        spared(draw(1, engine="memory", hours=20 / 3600)), temper="uploading", haste=10.0
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
        history.promises[known] = AcceptedRequest(
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
    moment = StateChange(nothing, nothing, [], history, lambda _: None, list)
    return what_is_anothers_is_not_found(moment, call)


@pytest.mark.parametrize("status", [200, 204, 400, 409])
def test_any_answer_about_anothers_job_but_that_there_is_none_is_a_breach(status: int) -> None:
    assert [*ask(THEIRS, status)] == [f"call 1 of us was answered {status}, and not 404"]


@pytest.mark.parametrize(("job_id", "status"), [(THEIRS, 404), (THEIRS, None), (OURS, 200)])
def test_no_answer_and_what_is_ones_own_are_no_breach(job_id: str, status: int | None) -> None:
    assert [*ask(job_id, status)] == []
