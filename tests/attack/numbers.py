"""Attacks with large numbers: of keys, exports and file inputs, and lists that grow on disk."""

from __future__ import annotations

import gzip
from contextlib import ExitStack

import httpx

from conveyor.domain.quota import DEFAULTS, Quota
from tests.attack.origin import Site, wait_until
from tests.attack.report import Ground, Report
from tests.attack.target import Target
from tests.attack.tenants import sites, starve

KEYS_COUNT = 250


def keys_by_the_hundred(ground: Ground, report: Report) -> None:
    """One client uses hundreds of API keys to submit pages that never answer."""

    def attack(ground: Ground, site: Site, target: Target, stack: ExitStack) -> None:
        tasks = [{"url": site.url("/silent", ground.arena.origin_host(n))} for n in range(20)]
        admitted = 0
        with httpx.Client(base_url=target.url, timeout=120, trust_env=False) as client:
            for number in range(KEYS_COUNT):
                answer = client.post(
                    "/v1/jobs",
                    headers={"X-API-Key": f"attacker-{number}"},
                    json={"tasks": tasks, "max_inflight": 10_000},
                )
                admitted += answer.status_code == 201
        report.at_most(
            "callers admitted from one address", admitted, DEFAULTS[Quota.ADDRESS_CALLERS]
        )
        wait_until("slots to fill", lambda: site.open_count >= 100)

    starve(ground, report, attack)


def things_without_end(ground: Ground, report: Report) -> None:
    """One caller creates more exports of a run and more file inputs than the quotas allow."""
    with sites(ground) as (_, site, target):
        job_id = target.submit([site.url(f"/page/{n}") for n in range(10)])
        target.wait_ended(job_id)
        run_id = target.run_of(job_id)["run_id"]
        path = f"/v1/jobs/{job_id}/runs/{run_id}/exports"
        statuses = [target.call("POST", path).status_code for _ in range(40)]
        slots = [
            target.call("POST", "/v1/job_inputs", json={"format": "text"}).status_code
            for _ in range(DEFAULTS[Quota.UPLOAD_SLOTS] + 30)
        ]
        report.at_most("exports of a run", statuses.count(202), DEFAULTS[Quota.EXPORTS_PER_RUN])
        report.equals("exports refused by quota", statuses.count(429), 40 - statuses.count(202))
        report.at_most("file inputs", slots.count(201), DEFAULTS[Quota.UPLOAD_SLOTS])


def lists_that_grow(ground: Ground, report: Report) -> None:
    """Lists of invalid lines, plain and compressed, whose rows need more space than the request."""
    lines_count = ground.choose(60_000, 300_000)
    shapes = {
        "empty objects": b"{}",
        "bad schemes": b'{"url":"ftp://a.b/c"}',
        "like URLs": b'{"url":"http://a.test/"}',
    }
    with sites(ground) as (_, _, target):
        for name, line in shapes.items():
            body = b'{"on_invalid":"skip","tasks":[' + b",".join([line] * lines_count) + b"]}"
            _grow(target, report, f"{name}, compressed", gzip.compress(body, 9), is_gzip=True)
            if len(line) == 2:
                _grow(target, report, name, body, is_gzip=False)


def _grow(target: Target, report: Report, name: str, sent: bytes, *, is_gzip: bool) -> None:
    before = target.disk_bytes()
    headers = {"Content-Type": "application/json"}
    if is_gzip:
        headers["Content-Encoding"] = "gzip"
    answer = target.call("POST", "/v1/jobs", "attacker", content=sent, headers=headers)
    if answer.status_code in (201, 202):
        target.wait_ended(answer.json()["job_id"], "attacker", deadline_s=60)
    grown = max(0, target.disk_bytes() - before - 4_000_000)
    report.at_most(f"bytes on disk for each byte sent, {name}", grown / len(sent), 100)
