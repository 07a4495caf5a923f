"""Tests backups of a data directory in use (docs/deploy.md, Backup and restore)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from conveyor.bootstrap import maintenance
from conveyor.cli.demo import Site, site_in_a_thread
from conveyor.config import BadSettings, Settings
from conveyor.engines.sqlite.backup import MANIFEST, BackupFailed, back_up, restore
from tests.cli.program import Program, dev_server, wait_until

pytestmark = pytest.mark.slow

KEY = {"X-API-Key": "a-caller"}


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with site_in_a_thread() as site:
        yield site


@pytest.fixture(scope="module")
def backup(tmp_path_factory: pytest.TempPathFactory, site: Site) -> Path:
    """A backup of a data directory with a finished run and a live one."""
    folder = tmp_path_factory.mktemp("source")
    with dev_server(folder) as url, httpx.Client(base_url=url, headers=KEY) as client:
        first = _submit(client, site.urls(60))
        wait_until(lambda: _run(client, first)["status"] == "completed")
        _submit(client, site.urls(800), max_inflight=4)
        wait_until(lambda: sum(job["stats"]["completed"] for job in _jobs(client)) > 80)

        ended = Program(folder, {}).run("backup", "copy")

        assert ended.code == 0, ended.err
        assert "every body is intact" in ended.out
        (folder / "audit.json").write_text(json.dumps(_audit(client, first)))
    return folder / "copy"


def _submit(client: httpx.Client, urls: list[str], **more: Any) -> str:
    tasks = [{"url": url} for url in urls]
    job: dict[str, Any] = client.post("/v1/jobs", json={"tasks": tasks, **more}).json()
    return str(job["job_id"])


def _jobs(client: httpx.Client) -> list[dict[str, Any]]:
    return [_run(client, job["job_id"]) for job in client.get("/v1/jobs").json()["jobs"]]


def _run(client: httpx.Client, job_id: str) -> dict[str, Any]:
    run: dict[str, Any] = client.get(f"/v1/jobs/{job_id}").json()["latest_run"]
    return run


def _audit(client: httpx.Client, job_id: str) -> dict[str, Any]:
    run_id = _run(client, job_id)["run_id"]
    audit: dict[str, Any] = client.get(f"/v1/jobs/{job_id}/runs/{run_id}/audit").json()
    return audit


def test_a_restored_run_has_the_same_audit_and_an_unfinished_one_is_finished(
    backup: Path, tmp_path: Path
) -> None:
    recorded = json.loads((backup.parent / "audit.json").read_text())
    Program(tmp_path, {}).run("restore", str(backup))

    with dev_server(tmp_path) as url, httpx.Client(base_url=url, headers=KEY) as client:
        jobs = client.get("/v1/jobs").json()["jobs"]
        wait_until(lambda: all(_run(client, job["job_id"])["terminal"] for job in jobs))
        audits = [_audit(client, job["job_id"]) for job in jobs]

    (same,) = [audit for audit in audits if audit["run_id"] == recorded["run_id"]]
    assert same == recorded
    assert [audit["ok"] for audit in audits] == [True, True]


def test_a_damaged_backup_is_not_restored(backup: Path, tmp_path: Path) -> None:
    names = json.loads((backup / MANIFEST).read_text())["files"]
    name = next(name for name in names if name.startswith("blobs/"))
    content = (backup / name).read_bytes()
    try:
        (backup / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

        with pytest.raises(BackupFailed, match="is damaged"):
            restore(backup, tmp_path / "data")
    finally:
        (backup / name).write_bytes(content)

    assert not (tmp_path / "data").exists()


def test_backup_and_restore_never_replace_existing_files(backup: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")

    with pytest.raises(BackupFailed, match="exists"):
        back_up(backup, tmp_path)
    with pytest.raises(BackupFailed, match="not empty"):
        restore(backup, tmp_path)

    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_body_that_was_deleted_meanwhile_is_counted(backup: Path, tmp_path: Path) -> None:
    restore(backup, tmp_path / "data")
    pack = next(path for path in (tmp_path / "data/blobs").rglob("*") if path.is_file())
    pack.chmod(0o600)
    pack.unlink()

    manifest = back_up(tmp_path / "data", tmp_path / "copy")

    assert manifest.removed > 0


@pytest.mark.parametrize("engine", ["aws", "postgres"])
def test_a_shared_engine_has_no_data_directory_to_back_up(tmp_path: Path, engine: str) -> None:
    settings = Settings(engine=engine, data_dir=tmp_path / "data")

    with pytest.raises(BadSettings, match="point-in-time recovery"):
        maintenance.back_up(settings, tmp_path / "target")
    with pytest.raises(BadSettings, match="point-in-time recovery"):
        maintenance.restore(settings, tmp_path / "source")
