"""Tests two releases on one deployment: each reads and finishes runs of the other
(docs/deploy.md, Upgrades)."""

from __future__ import annotations

import io
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.e2e.cloud import Cloud, a_client, aws_deployment, ended_run, run_of
from tests.e2e.programs import Server, a_site, until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
#: The commit that stands for the previous release. Update it when a release is made.
PREVIOUS = "47d810215304e225173f2c8ac9d3824e4878684f"
PAGES = 120


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source tree of the previous release."""
    packed = subprocess.run(
        ["git", "-C", str(ROOT), "archive", PREVIOUS, "conveyor", "actors"],
        capture_output=True,
        check=False,
    )
    if packed.returncode:
        pytest.skip(f"the history of this clone does not reach back to {PREVIOUS}")
    folder = tmp_path_factory.mktemp("previous")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as tree:
        tree.extractall(folder, filter="data")
    return folder


@pytest.fixture
def cloud(request: pytest.FixtureRequest, redis: str, tmp_path: Path) -> Iterator[Cloud]:
    with aws_deployment(request, tmp_path, redis=redis) as cloud:
        yield cloud


def _tree(release: str, previous: Path) -> dict[str, str]:
    """Returns the environment of a process of this release."""
    return {"PYTHONPATH": str(previous if release == "previous" else ROOT)}


def _count_finished(client: httpx.Client, job_id: str) -> int:
    stats = run_of(client, job_id)["stats"]
    return int(stats["completed"])


@pytest.mark.parametrize(("first", "second"), [("previous", "this"), ("this", "previous")])
def test_one_release_finishes_a_run_that_the_other_began(
    cloud: Cloud, previous: Path, first: str, second: str
) -> None:
    first_tree, second_tree = _tree(first, previous), _tree(second, previous)
    if (
        second == "previous"
    ):  # The previous release cannot read packs, so the first one writes none.
        first_tree["CONVEYOR_PACK_WAIT_MS"] = "0"
    with a_site() as site:
        tasks = [{"url": url} for url in site.urls(PAGES)]
        with a_client(cloud.api(**first_tree)) as client:
            worker = cloud.start("worker", **first_tree)
            submitted = client.post("/v1/jobs", json={"tasks": tasks, "max_inflight": 3})
            assert submitted.status_code == 201, submitted.text
            job_id = submitted.json()["job_id"]
            until("the first pages", lambda: _count_finished(client, job_id) > 10)
            cloud.start("worker", **second_tree)
            until("more pages", lambda: _count_finished(client, job_id) > 30)
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(timeout=120) == 0

        with a_client(cloud.api(**second_tree)) as client:
            run = until("the run to end", lambda: ended_run(client, job_id))
            audit = client.get(f"/v1/jobs/{job_id}/runs/{run['run_id']}/audit").json()

    assert run["status"] == "completed"
    assert run["stats"]["completed"] == PAGES
    assert audit["ok"] is True


@pytest.mark.parametrize(("first", "second"), [("previous", "this")])
def test_this_release_finishes_the_run_of_a_data_directory_of_the_previous_one(
    tmp_path: Path, previous: Path, first: str, second: str
) -> None:
    server = Server(tmp_path / "data", environ=_tree(first, previous))
    with a_site() as site:
        server.start()
        tasks = [{"url": url} for url in site.urls(PAGES)]
        answer = server.call("POST", "/v1/jobs", json={"tasks": tasks, "max_inflight": 3})
        job_id = answer.json()["job_id"]
        until("the first pages", lambda: len(site.request_counts) > 10)
        server.kill()

        server = replace(server, environ=_tree(second, previous))
        server.start()
        run = until("the run to end", lambda: server.ended_run(job_id))
        audit = server.call("GET", f"/v1/jobs/{job_id}/runs/{run['run_id']}/audit").json()
        server.kill()

    assert run["status"] == "completed"
    assert run["stats"]["completed"] == PAGES
    assert audit["ok"] is True
