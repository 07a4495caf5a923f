"""Attacks that make pages expensive: failing storage, malformed tasks, refusing gateways."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from tests.attack.gateway import PaidGateway
from tests.attack.origin import Site, serve
from tests.attack.report import Ground, Report
from tests.attack.target import Target, running
from tests.attack.volume import small_volume

WATCH_S = 5.0


@contextmanager
def _a_gateway(ground: Ground, plan: int | None = None) -> Iterator[PaidGateway]:
    gateway = PaidGateway(ground.arena.gateway_address, plan=plan)
    with serve(gateway, ground.arena.port):
        yield gateway


def _target(ground: Ground, gateway: PaidGateway | None = None, **environ: str) -> Target:
    if gateway is not None:
        # The operator configures the gateway, so its address may be private.
        environ["CONVEYOR_GATEWAY_URL"] = gateway.url("/v1/")
    return Target(ground.python, ground.folder, {**ground.arena.environ, **environ})


def storage_full(ground: Ground, report: Report) -> None:
    """The volume of the bodies fills up while pages of a paid gateway are fetched."""
    with _a_gateway(ground) as gateway, running(_target(ground, gateway)) as target:
        blobs = target.data_dir / "blobs"
        filler = blobs / "filler"
        with small_volume(blobs, 64):
            job_id = _begin(ground, target, gateway)
            _fill(filler)
            _watch_outage(ground, report, target, gateway, job_id)
            filler.unlink()
            _watch_recovery(ground, report, target, gateway, job_id)


def storage_gone(ground: Ground, report: Report) -> None:
    """The folder of the bodies disappears while pages are fetched, and comes back."""
    with _a_gateway(ground) as gateway, running(_target(ground, gateway)) as target:
        blobs = target.data_dir / "blobs"
        job_id = _begin(ground, target, gateway)
        blobs.rename(target.data_dir / "elsewhere")
        _watch_outage(ground, report, target, gateway, job_id)
        (target.data_dir / "elsewhere").rename(blobs)
        _watch_recovery(ground, report, target, gateway, job_id)


def _fill(filler: Path) -> None:
    """Fills the volume with one file."""
    descriptor = os.open(filler, os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):
        while os.write(descriptor, bytes(1 << 16)):
            pass
    os.close(descriptor)


# More pages than are in flight at the same time, and few enough that the list is not staged.
PAGES_COUNT = 300


def _begin(ground: Ground, target: Target, gateway: PaidGateway) -> str:
    """Submits a job with a budget of a little more than its pages, and waits for a tenth."""
    count = PAGES_COUNT
    urls = [f"http://{ground.arena.victim_address}/page/{n}" for n in range(count)]
    job_id = target.submit(urls, budget={"credits": count + 10})
    give_up_at = time.monotonic() + 20
    while gateway.paid_count < count / 10 and time.monotonic() < give_up_at:
        time.sleep(0.01)
    return job_id


def _watch_outage(
    ground: Ground, report: Report, target: Target, gateway: PaidGateway, job_id: str
) -> None:
    time.sleep(2.0)  # Pages in flight arrive, and the worker keeps them in memory.
    before = gateway.paid_count
    log_bytes = target.log.stat().st_size
    watch_s = ground.choose(8, 300)
    time.sleep(watch_s)
    run = target.run_of(job_id)
    report.equals("paid calls while nothing can be stored", gateway.paid_count - before, 0)
    report.equals("tasks failed because of the storage", run["stats"]["failed"], 0)
    waits = str(run.get("waiting_on", ""))
    report.equals("waiting_on says storage", float("storage" in waits), 1)
    written = target.log.stat().st_size - log_bytes
    report.at_most("kilobytes of log a minute", written / 1000 / watch_s * 60, 100)


def _watch_recovery(
    ground: Ground, report: Report, target: Target, gateway: PaidGateway, job_id: str
) -> None:
    count = PAGES_COUNT
    target.wait_ended(job_id, deadline_s=120)
    stats = target.run_of(job_id)["stats"]
    report.equals("pages stored of all", stats["successful"] / count, 1)
    report.at_most("paid calls a page", gateway.paid_count / count, 1.02)
    spend = stats["spend"]["credits"]
    report.equals("paid calls missing in spend", gateway.paid_count - spend, 0)


def poisoned_parameter(ground: Ground, report: Report) -> None:
    """A list has 300 valid pages and one task whose parameter has 5,000 digits."""
    site = Site(ground.arena.victim_address)
    with serve(site, ground.arena.port), running(_target(ground)) as target:
        pages = [{"url": site.url(f"/slow/{n}")} for n in range(300)]
        poison = {"allowed_status_codes": "9" * 5000}
        tasks = [{"url": site.url("/slow/poison"), "zenrows_params": poison}, *pages]
        answer = target.call("POST", "/v1/jobs", json={"tasks": tasks, "on_invalid": "skip"})
        report.equals("status of the submit", answer.status_code, 201)
        target.wait_ended(answer.json()["job_id"], deadline_s=20)
        run = target.run_of(answer.json()["job_id"])
        report.equals("the run ended", float(run["terminal"]), 1)
        report.equals("good pages stored", run["stats"]["successful"], 300)
        report.at_most("fetches for 300 pages", sum(site.request_counts.values()), 300)
        report.at_most("kilobytes of log", target.log.stat().st_size / 1000, 100)


def gateway_with_a_plan(ground: Ground, report: Report) -> None:
    """A list has more pages than the gateway's plan of 20 calls accepts at the same time."""
    count = ground.choose(300, 900)
    with _a_gateway(ground, plan=20) as gateway, running(_target(ground, gateway)) as target:
        urls = [f"http://{ground.arena.victim_address}/page/{n}" for n in range(count)]
        job_id = target.submit(urls)
        target.wait_ended(job_id, deadline_s=120)
        stats = target.run_of(job_id)["stats"]
        report.equals("pages stored of all", stats["successful"] / count, 1)
        report.equals("tasks failed", stats["failed"], 0)
        report.at_most("refusals by the gateway, per page", gateway.refused_count / count, 0.02)
        report.at_most("paid calls a page", gateway.paid_count / count, 1.02)


def gateway_away(ground: Ground, report: Report) -> None:
    """The gateway is unreachable, then answers 503 to every call, then works."""
    count = ground.choose(300, 900)
    gateway = PaidGateway(ground.arena.gateway_address, plan=50)
    with serve(gateway, ground.arena.port):
        address = gateway.url("/v1/")
        port = gateway.port
    with running(_target(ground, None, CONVEYOR_GATEWAY_URL=address)) as target:
        urls = [f"http://{ground.arena.victim_address}/page/{n}" for n in range(count)]
        job_id = target.submit(urls)
        time.sleep(WATCH_S)
        run = target.run_of(job_id)
        report.equals("tasks failed while it is unreachable", run["stats"]["failed"], 0)
        waits = run.get("waiting_on", "")
        report.equals("waiting_on says gateway", float("gateway" in str(waits)), 1)
        gateway.is_down = True
        with serve(gateway, port):
            time.sleep(WATCH_S)
            run = target.run_of(job_id)
            report.equals("tasks failed while it answers 503", run["stats"]["failed"], 0)
            gateway.is_down = False
            target.wait_ended(job_id, deadline_s=120)
            stats = target.run_of(job_id)["stats"]
        report.equals("pages stored of all", stats["successful"] / count, 1)
        report.at_most("paid calls a page", gateway.paid_count / count, 1.02)


def descriptors_used_up(ground: Ground, report: Report) -> None:
    """Clients hold 300 connections to a process that may open 256 files and fetches 200 pages."""
    site = Site(ground.arena.victim_address)
    limit = ("prlimit", "--nofile=256:256")
    target = Target(ground.python, ground.folder, dict(ground.arena.environ), prefix=limit)
    with serve(site, ground.arena.port), running(target):
        urls = [site.url(f"/page/{n}") for n in range(200)]
        strangers = []
        for _ in range(300):
            stranger = socket.socket()
            stranger.settimeout(2)
            try:
                stranger.connect(target.address)
                stranger.sendall(
                    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
                )
            except OSError:
                pass
            strangers.append(stranger)
        time.sleep(0.5)
        try:
            job_id = target.submit(urls)
            target.wait_ended(job_id, deadline_s=60)
            stats = target.run_of(job_id)["stats"]
            report.equals("tasks failed because of our own limit", stats["failed"], 0)
            report.equals("pages stored", stats["successful"], 200)
        except httpx.TransportError as error:
            report.equals(f"the API answers ({type(error).__name__})", 0, 1)
        finally:
            for stranger in strangers:
                stranger.close()
