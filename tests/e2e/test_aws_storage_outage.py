"""Tests an outage of the AWS engine's bucket with a gateway that charges (SPEC.md 4.11).

With `CONVEYOR_TEST_OUTAGE_S=300` the outage lasts five minutes; `-s` prints the figures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.attack.gateway import PaidGateway
from tests.attack.origin import serve
from tests.e2e.cloud import Cloud, a_client, aws_deployment, ended_run, run_of
from tests.e2e.programs import until
from tests.e2e.refusing import RefusingProxy

pytestmark = pytest.mark.slow

OUTAGE_S = float(os.environ.get("CONVEYOR_TEST_OUTAGE_S", "8"))
# More pages than are in flight at the same time, and few enough that the list is not staged.
PAGES = 300


@pytest.fixture
def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cloud]:
    with aws_deployment(request, tmp_path) as cloud:
        yield cloud


@pytest.mark.parametrize(
    ("status", "code"),
    [("404 Not Found", "NoSuchBucket"), ("403 Forbidden", "AccessDenied")],
    ids=["deleted", "denied"],
)
def test_pages_are_paid_once_although_the_bucket_is_unavailable(
    cloud: Cloud, status: str, code: str
) -> None:
    gateway = PaidGateway("127.0.0.1", think_s=1.0)
    with ExitStack() as stack:
        stack.enter_context(serve(gateway, None))
        proxy: Any = RefusingProxy(cloud.environ["AWS_ENDPOINT_URL_S3"], status, code)
        stack.enter_context(serve(proxy, None))
        cloud.environ["AWS_ENDPOINT_URL_S3"] = proxy.url
        cloud.environ["CONVEYOR_GATEWAY_URL"] = gateway.url("/v1/")
        client = stack.enter_context(a_client(cloud.api()))
        cloud.workers(1)
        tasks = [{"url": f"https://example.com/{number}"} for number in range(PAGES)]
        body = {"tasks": tasks, "max_attempts": 2}
        job_id = client.post("/v1/jobs", json=body).json()["job_id"]
        until("some pages", lambda: gateway.paid_count >= PAGES / 10 or None)

        proxy.is_refusing = True
        waiting = until("the run to wait", lambda: _waits_on_storage(run_of(client, job_id)))
        paid_before = gateway.paid_count
        time.sleep(OUTAGE_S)
        during = run_of(client, job_id)
        paid_during = gateway.paid_count - paid_before
        proxy.is_refusing = False
        run = until("the end", lambda: ended_run(client, job_id), deadline_s=240)

    stats = run["stats"]
    print(
        f"{OUTAGE_S:.0f} s outage: {gateway.paid_count} paid calls for {PAGES} pages "
        f"({gateway.paid_count / PAGES:.3f}), {paid_during} during it, {stats['failed']} failed"
    )
    assert waiting
    assert proxy.refused_count
    assert _waits_on_storage(during)
    assert paid_before < PAGES, "all pages were fetched before the outage"
    assert during["stats"]["failed"] == 0
    assert (stats["successful"], stats["failed"]) == (PAGES, 0)
    assert gateway.paid_count / PAGES <= 1.02
    assert stats["spend"]["credits"] == gateway.paid_count


def _waits_on_storage(run: dict[str, Any]) -> bool | None:
    return "storage" in str(run.get("waiting_on", "")) or None
