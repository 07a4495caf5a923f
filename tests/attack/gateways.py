"""Attacks by paid gateways: limits, outages, failing targets, false headers, abandoned calls."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from tests.attack.gateway import PaidGateway
from tests.attack.origin import serve, wait_until
from tests.attack.report import Ground, Report
from tests.attack.target import Target, running

UP_S = 3.0
# A plan of 20 concurrent calls with pages of 0.2 s allows 100 pages a second.
PAGES_PER_S = 100


@contextmanager
def _a_target(ground: Ground, gateway: PaidGateway, processes: int = 1) -> Iterator[Target]:
    arguments = ("--processes", str(processes)) if processes > 1 else ()
    environ = {**ground.arena.environ, "CONVEYOR_GATEWAY_URL": gateway.url("/v1/")}
    target = Target(ground.python, ground.folder, environ, arguments=arguments)
    with running(target):
        yield target


def _pages(ground: Ground, count: int, name: str = "page") -> list[str]:
    return [f"http://{ground.arena.victim_address}/{name}/{number}" for number in range(count)]


def _is_waiting_on(reason: str, target: Target, job_id: str) -> bool:
    return reason in str(target.run_of(job_id).get("waiting_on"))


def _report_pages(
    report: Report, gateway: PaidGateway, target: Target, job_id: str, count: int
) -> None:
    stats = target.run_of(job_id)["stats"]
    report.equals("pages stored of all", stats["successful"] / count, 1)
    report.equals("tasks failed", stats["failed"], 0)
    report.at_most("paid calls a page", gateway.paid_count / count, 1.02)


def plan_for_two_processes(ground: Ground, report: Report) -> None:
    """Two worker processes share a plan of 20 calls; with --long for five minutes."""
    count = ground.choose(600, 300 * PAGES_PER_S)
    gateway = PaidGateway(ground.arena.gateway_address, plan=20)
    with serve(gateway, ground.arena.port), _a_target(ground, gateway, processes=2) as target:
        job_id = target.submit(_pages(ground, count))
        took_s = target.wait_ended(job_id, deadline_s=120 + count / PAGES_PER_S * 3)
        _report_pages(report, gateway, target, job_id, count)
        report.at_most("calls at once", gateway.working_count_max, 20)
        report.at_most("refusals by the gateway", gateway.refused_count, 1)
        report.at_most("times as long as the plan needs", (took_s or 1e9) * PAGES_PER_S / count, 4)


def plan_that_others_use(ground: Ground, report: Report) -> None:
    """The limit header says 20, but another user of the same key takes 15 of these calls."""
    count = ground.choose(100, 1_000)
    gateway = PaidGateway(
        ground.arena.gateway_address, plan=5, states=lambda plan, remaining: ("20", str(remaining))
    )
    with serve(gateway, ground.arena.port), _a_target(ground, gateway) as target:
        job_id = target.submit(_pages(ground, count))
        target.wait_ended(job_id, deadline_s=120)
        _report_pages(report, gateway, target, job_id, count)
        report.at_most("refusals by the gateway", gateway.refused_count, 6 + count / 50)


def outage_of_the_gateway(ground: Ground, report: Report) -> None:
    """The gateway fails in the middle of a run for 20 s, with --long for five minutes: half of the
    time it answers 503 to every call, half of the time it does not listen."""
    count, away_s = 900, ground.choose(20, 300)
    gateway = PaidGateway(ground.arena.gateway_address, plan=20)
    with serve(gateway, ground.arena.port):
        port = gateway.port
        endpoint_url = gateway.url("/v1/")
        target = Target(
            ground.python,
            ground.folder,
            {**ground.arena.environ, "CONVEYOR_GATEWAY_URL": endpoint_url},
        )
        target.start()
        job_id = target.submit(_pages(ground, count), max_attempts=1)
        time.sleep(UP_S)
        gateway.is_down = True
        time.sleep(away_s / 2)
        named = partial(_is_waiting_on, "gateway_unavailable", target, job_id)
        wait_until("waiting_on to name the gateway", named)
    try:
        time.sleep(away_s / 2)
        stats = target.run_of(job_id)["stats"]
        report.equals("tasks failed during the outage", stats["failed"], 0)
        failed_calls = sum(gateway.request_counts.values()) - gateway.paid_count
        gateway.is_down = False
        with serve(gateway, port):
            took_s = target.wait_ended(job_id, deadline_s=120)
            _report_pages(report, gateway, target, job_id, count)
        report.at_most("calls without a page, per page", failed_calls / count, 0.1)
        report.at_most("seconds from the end of the outage to the end", took_s, 60)
    finally:
        target.end()


def targets_that_the_gateway_fails_for(ground: Ground, report: Report) -> None:
    """The gateway answers 503 for 12 targets of 300, and pages for the others."""
    pages = _pages(ground, 300)
    gateway = PaidGateway(ground.arena.gateway_address, plan=20, poisoned=frozenset(pages[::25]))
    with serve(gateway, ground.arena.port), _a_target(ground, gateway) as target:
        job_id = target.submit(pages)
        took_s = target.wait_ended(job_id, deadline_s=90)
        stats = target.run_of(job_id)["stats"]
        report.at_most("seconds until the run ended", took_s, 60)
        report.equals("targets that failed", stats["failed"], len(gateway.poisoned))
        report.equals("pages stored", stats["successful"], 300 - len(gateway.poisoned))
        report.at_most("paid calls a page", gateway.paid_count / stats["successful"], 1.02)


def gateway_that_lies(ground: Ground, report: Report) -> None:
    """The reported limit changes with each response and may be invalid; Retry-After is a year."""
    lies = ["0", "-7", "9" * 30, "20", "", "3.5", "1"]
    count = 60

    def state(plan: int, remaining: int) -> tuple[str, str]:
        return lies[remaining % len(lies)], lies[(remaining * 3) % len(lies)]

    gateway = PaidGateway(ground.arena.gateway_address, plan=10, states=state)
    with serve(gateway, ground.arena.port), _a_target(ground, gateway) as target:
        job_id = target.submit(_pages(ground, count))
        target.wait_ended(job_id, deadline_s=120)
        _report_pages(report, gateway, target, job_id, count)
        gateway.plan, gateway.retry_after, gateway.refused_count = 0, "31536000", 0
        job_id = target.submit(_pages(ground, 5, "later"))
        named = partial(_is_waiting_on, "gateway_limit", target, job_id)
        wait_until("waiting_on to name the gateway's limit", named)
        time.sleep(UP_S)
        report.at_most("refusals while Retry-After lasts", gateway.refused_count, 5)


def pages_like_problems(ground: Ground, report: Report) -> None:
    """Pages of a site that begin like a problem of the gateway and are nested 50,000 deep."""
    count = ground.choose(30, 300)
    prologue = b'{"code":"AUTH004","title":' + b"[" * 50_000
    gateway = PaidGateway(ground.arena.gateway_address, plan=5, prologue=prologue)
    with serve(gateway, ground.arena.port), _a_target(ground, gateway) as target:
        job_id = target.submit(_pages(ground, count))
        target.wait_ended(job_id, deadline_s=60)
        _report_pages(report, gateway, target, job_id, count)
        spent = target.run_of(job_id)["stats"]["spend"]["cost"]
        report.equals("paid calls missing in spend", gateway.paid_count - spent, 0)


def stop_of_paid_calls(ground: Ground, report: Report) -> None:
    """A run is stopped while all calls of the plan are in progress; another run follows."""
    gateway = PaidGateway(ground.arena.gateway_address, plan=8)
    with serve(gateway, ground.arena.port), _a_target(ground, gateway) as target:
        target.wait_ended(target.submit(_pages(ground, 20, "first")))
        gateway.think_s = 20.0
        job_id = target.submit(_pages(ground, 50))
        wait_until("calls in progress", lambda: gateway.working_count == 8)
        answer = target.call("POST", f"/v1/jobs/{job_id}/stop").json()
        report.equals("calls that the receipt reports as abandoned", _abandoned(answer), 8)
        target.submit(_pages(ground, 50, "next"))
        time.sleep(ground.choose(10, 60))
        report.equals("refusals after the stop", gateway.refused_count, 0)
        report.at_most("calls at once", gateway.working_count_max, 8)


def _abandoned(answer: dict[str, object]) -> float | None:
    """Returns the number of abandoned calls in the response to the stop."""
    for value in (answer, *answer.values()):
        if isinstance(value, dict) and isinstance(value.get("abandoned"), int):
            return float(value["abandoned"])
    return None
