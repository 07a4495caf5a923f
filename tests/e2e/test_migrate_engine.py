"""Tests `conveyor migrate-engine`: Postgres continues the runs of a stopped data directory, with
equal audits, however often the copy was killed."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from conveyor.cli.demo import Site, site_in_a_thread
from tests.cli.program import CONVEYOR, Program, dev_server, wait_until
from tests.conformance.coordinators import a_space
from tests.e2e.cloud import Cloud, a_client
from tests.e2e.postgres import Deployment, postgres_deployment
from tests.e2e.postgres_audit import violations
from tests.e2e.programs import KEY
from tests.postgres import execute
from tests.servers import ACCESS_KEY, SECRET_KEY

pytestmark = pytest.mark.slow

Audits = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with site_in_a_thread() as site:
        yield site


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, site: Site) -> tuple[Path, Audits]:
    """A folder with a stopped data directory, and the audits of its two runs. One run has ended;
    the other is paused, so that its audit does not change."""
    folder = tmp_path_factory.mktemp("source")
    with dev_server(folder) as url, httpx.Client(base_url=url, headers=KEY) as client:
        ended = _submit(client, site.urls(60))
        wait_until(lambda: _run(client, ended)["status"] == "completed")
        live = _submit(client, site.urls(700), max_inflight=4)
        wait_until(lambda: _run(client, live)["stats"]["completed"] > 80)
        client.post(f"/v1/jobs/{live}/pause").raise_for_status()
        wait_until(lambda: _run(client, live)["stats"]["inflight"] == 0)
        audits = {job_id: _audit(client, job_id) for job_id in (ended, live)}
    return folder, audits


@pytest.fixture
def deployment(tmp_path: Path, source: tuple[Path, Audits]) -> Iterator[Deployment]:
    """A database without tables, and a copy of the data directory at `tmp_path / "data"`."""
    folder, _ = source
    shutil.copytree(folder / ".conveyor", tmp_path / "data")
    own_key = (tmp_path / "data/secret.key").read_text().strip()
    with postgres_deployment(tmp_path, "fsync=off", is_set_up=False) as deployment:
        deployment.cloud.environ["CONVEYOR_SECRET_KEY"] = f"secret.key:{own_key}"
        yield deployment


def _submit(client: httpx.Client, urls: list[str], **more: Any) -> str:
    body = {"tasks": [{"url": url} for url in urls], **more}
    answer = client.post("/v1/jobs", json=body).raise_for_status()
    return str(answer.json()["job_id"])


def _run(client: httpx.Client, job_id: str) -> dict[str, Any]:
    run: dict[str, Any] = client.get(f"/v1/jobs/{job_id}").json()["latest_run"]
    return run


def _audit(client: httpx.Client, job_id: str) -> dict[str, Any]:
    run_id = _run(client, job_id)["run_id"]
    audit: dict[str, Any] = client.get(f"/v1/jobs/{job_id}/runs/{run_id}/audit").json()
    return audit


def _position(deployment: Deployment) -> object:
    """Returns the position of the copy; None before it begins."""
    there = "SELECT to_regclass('engine_migrations') IS NOT NULL"
    if trio.run(execute, deployment.server.url, there) == [(False,)]:
        return None
    sql = "SELECT step, position, has_ended FROM engine_migrations"
    return next(iter(trio.run(execute, deployment.server.url, sql)), None)


def _kill_after_a_step(deployment: Deployment, data_dir: Path) -> None:
    """Starts the copy, and kills it after its position has changed."""
    before = _position(deployment)
    process = subprocess.Popen(
        [CONVEYOR, "migrate-engine", str(data_dir)],
        env=deployment.cloud.environ,
        stdout=subprocess.DEVNULL,
    )
    with process:
        # The directory is marked after the first position is stored, and before the copy.
        while process.poll() is None and (
            _position(deployment) == before or not (data_dir / "migration.json").exists()
        ):
            time.sleep(0.002)
        process.kill()


def _finish_live_run(cloud: Cloud, audits: Audits) -> Audits:
    """Serves the copy: checks the audits, resumes the paused run, and returns the new audits."""
    with a_client(cloud.api()) as client:
        assert {job_id: _audit(client, job_id) for job_id in audits} == audits
        cloud.workers(1)
        for job_id in audits:
            if not _run(client, job_id)["terminal"]:
                client.post(f"/v1/jobs/{job_id}/resume").raise_for_status()
        wait_until(lambda: all(_run(client, job_id)["terminal"] for job_id in audits))
        return {job_id: _audit(client, job_id) for job_id in audits}


def test_a_copy_that_was_killed_repeatedly_has_equal_audits_and_finishes_its_run(
    deployment: Deployment, source: tuple[Path, Audits], tmp_path: Path
) -> None:
    for _ in range(3):
        _kill_after_a_step(deployment, tmp_path / "data")

    out = deployment.cloud.run("migrate-engine", str(tmp_path / "data"))
    again = deployment.cloud.run("migrate-engine", str(tmp_path / "data"))

    assert "the audits of both sides are equal" in out
    assert "was migrated before" in again
    audits = _finish_live_run(deployment.cloud, source[1])
    assert [audit["ok"] for audit in audits.values()] == [True, True]
    assert [audit["counts"]["done"] for audit in audits.values()] == [60, 700]
    assert violations(deployment.server.url, deployment.blob_dir) == []


def test_bodies_can_be_copied_to_a_bucket(
    deployment: Deployment, source: tuple[Path, Audits], tmp_path: Path, seaweed: str
) -> None:
    deployment.cloud.environ |= {
        "CONVEYOR_BLOB_DIR": "",
        "CONVEYOR_BUCKET": a_space(),
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": seaweed,
    }
    deployment.cloud.run("init")

    deployment.cloud.run("migrate-engine", str(tmp_path / "data"))

    audits = _finish_live_run(deployment.cloud, source[1])
    assert [audit["ok"] for audit in audits.values()] == [True, True]


def test_neither_engine_starts_before_the_copy_is_complete(
    deployment: Deployment, tmp_path: Path
) -> None:
    data_dir = tmp_path / "data"
    _kill_after_a_step(deployment, data_dir)
    dev = Program(tmp_path, {"CONVEYOR_DATA_DIR": str(data_dir), "CONVEYOR_PORT": "0"})

    on_the_source = dev.run("dev")
    on_the_target = Program(tmp_path, deployment.cloud.environ).run("worker")

    assert (on_the_source.code, on_the_target.code) == (2, 2)
    assert "conveyor migrate-engine" in on_the_source.err
    assert "conveyor migrate-engine" in on_the_target.err


def test_the_migration_of_a_directory_in_use_is_refused(
    deployment: Deployment, tmp_path: Path
) -> None:
    program = Program(tmp_path, deployment.cloud.environ)
    with dev_server(tmp_path, CONVEYOR_DATA_DIR=str(tmp_path / "data")):
        refused = program.run("migrate-engine", str(tmp_path / "data"))

    assert refused.code == 2
    assert "in use" in refused.err
    assert not (tmp_path / "data/migration.json").exists()


def test_the_migration_into_a_database_with_jobs_is_refused(
    deployment: Deployment, tmp_path: Path
) -> None:
    deployment.cloud.run("init")
    trio.run(execute, deployment.server.url, "INSERT INTO feeds VALUES ('someone', 1)")

    refused = Program(tmp_path, deployment.cloud.environ).run(
        "migrate-engine", str(tmp_path / "data")
    )

    assert refused.code == 2
    assert "not empty" in refused.err
    assert not (tmp_path / "data/migration.json").exists()


def test_the_migration_with_another_secret_key_is_refused(
    deployment: Deployment, tmp_path: Path
) -> None:
    refused = Program(tmp_path, deployment.cloud.environ).run(
        "migrate-engine", str(tmp_path / "data"), CONVEYOR_SECRET_KEY="another"
    )

    assert refused.code == 2
    assert "another secret key" in refused.err
