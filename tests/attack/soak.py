"""Hours of mixed load: measures memory, descriptors and disk while jobs come and go."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.attack.origin import Site, serve
from tests.attack.report import Ground, Report
from tests.attack.target import Target, running

SHORT_S = 20.0
LONG_S = 4 * 3600.0
SAMPLES = 24
JOBS_AT_ONCE = 4
# Caches, pools and the pages of the database grow at first; a shorter run shows no trend.
WARM_MINUTES = 10


@dataclass(frozen=True, slots=True)
class Sample:
    """The resources of the process `at_s` seconds after its start, and the jobs until then."""

    at_s: float
    jobs: int
    rss_mb: float
    descriptors: int
    disk_mb: float


def soak(ground: Ground, report: Report) -> None:
    """Creates, runs, reads and deletes jobs, and samples memory, descriptors and disk."""
    seconds = ground.minutes * 60 or (LONG_S if ground.is_long else SHORT_S)
    site = Site(ground.arena.victim_address)
    target = Target(ground.python, ground.folder, dict(ground.arena.environ))
    samples: list[Sample] = []
    with serve(site, ground.arena.port), running(target):
        started_at, jobs = time.monotonic(), 0
        while (at_s := time.monotonic() - started_at) < seconds:
            if at_s >= len(samples) * seconds / SAMPLES:
                samples.append(_measure(target, at_s, jobs))
                print(f"  {samples[-1]}", flush=True)
            jobs += _make_and_delete(target, site, jobs)
        samples.append(_measure(target, seconds, jobs))
    quarter, last = samples[len(samples) // 4], samples[-1]
    minutes = (last.at_s - quarter.at_s) / 60
    grown_mb = last.rss_mb - quarter.rss_mb
    report.at_least("jobs made and deleted", jobs, 10)
    if minutes < WARM_MINUTES:
        return
    report.at_most("MB of memory grown after the first quarter", grown_mb, 16)
    report.at_most("MB of memory grown a minute since then", grown_mb / minutes, 0.5 + 8 / minutes)
    report.at_most("descriptors more since then", last.descriptors - quarter.descriptors, 16)
    report.at_most("MB of disk more since then", last.disk_mb - quarter.disk_mb, 64)


def _make_and_delete(target: Target, site: Site, number: int) -> int:
    """Submits jobs with small and large pages, redirects, bad encodings and failing pages. Each job
    is read, then stopped, rerun or exported in turn, and deleted."""
    keys = [f"caller-{(number + offset) % 50}" for offset in range(JOBS_AT_ONCE)]
    urls = [site.url(f"/page/{number}-{page}") for page in range(10)]
    odd_urls = [
        site.url("/large"),
        site.url(f"/redirect?to={site.url('/page/other')}&status=302"),
        site.url("/encoded?kind=zstd-frames"),
        site.url("/late"),
        site.url("/slow/1"),
    ]
    started = [
        (target.submit(urls + odd_urls[offset : offset + 1], key, max_attempts=1), key)
        for offset, key in enumerate(keys)
    ]
    uses = [_stop, _read_and_rerun, _export, _read]
    for (job_id, key), use in zip(started, uses, strict=True):
        use(target, job_id, key)
        target.call("DELETE", f"/v1/jobs/{job_id}", key)
    return len(started)


def _stop(target: Target, job_id: str, key: str) -> None:
    target.call("POST", f"/v1/jobs/{job_id}/stop", key)


def _read(target: Target, job_id: str, key: str) -> None:
    target.wait_ended(job_id, key)
    target.call("GET", f"/v1/jobs/{job_id}/results", key)


def _read_and_rerun(target: Target, job_id: str, key: str) -> None:
    _read(target, job_id, key)
    rerun = target.call("POST", f"/v1/jobs/{job_id}/rerun", key, json={})
    assert rerun.is_success, rerun.text
    target.wait_ended(job_id, key)


def _export(target: Target, job_id: str, key: str) -> None:
    target.wait_ended(job_id, key)
    run_id = target.run_of(job_id, key)["run_id"]
    response = target.call("POST", f"/v1/jobs/{job_id}/runs/{run_id}/exports", key, json={})
    assert response.is_success, response.text
    time.sleep(0.2)  # Some exports are deleted before they are complete.


def _measure(target: Target, at_s: float, jobs: int) -> Sample:
    assert target.process is not None
    process = Path(f"/proc/{target.process.pid}")
    pages = int((process / "statm").read_text().split()[1])
    return Sample(
        at_s=round(at_s, 1),
        jobs=jobs,
        rss_mb=round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1),
        descriptors=len(os.listdir(process / "fd")),
        disk_mb=round(_measure_disk(target.data_dir) / 1e6, 1),
    )


def _measure_disk(folder: Path) -> int:
    """Returns the bytes used by a folder, whose files may be deleted meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(place, name)).st_blocks * 512
    return total
