"""Tests starts from copies of a live data directory, with torn files."""

from __future__ import annotations

import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.chaos.torn_files import WAL, tear_log, tear_packs
from tests.e2e.audit import violations
from tests.e2e.programs import Server, a_server, a_site, until

pytestmark = pytest.mark.slow

PAGES = 400
IMAGES = int(os.environ.get("CONVEYOR_TEST_IMAGES", "3"))


def test_a_server_finishes_its_run_from_any_image_of_its_data_directory(tmp_path: Path) -> None:
    randomness = Random(11)
    (tmp_path / "live").mkdir()
    with a_site() as site, a_server(tmp_path / "live" / "data") as server:
        tasks = [{"url": url} for url in site.urls(PAGES)]
        body = {"tasks": tasks, "max_inflight": 20}
        job_id = server.call("POST", "/v1/jobs", json=body).json()["job_id"]
        images = []
        for number in range(IMAGES):
            time.sleep(randomness.uniform(0.05, 2.0 * 4 / IMAGES))
            images.append(_image(server, tmp_path / f"image-{number}" / "data"))
        server.kill()

        for image in images:
            _tear(image, randomness)
            with a_server(image) as heir:
                run = until("the run to end", partial(heir.ended_run, job_id))
            assert run["stats"]["completed"] == run["stats"]["total"] == PAGES
            assert violations(image) == []
            shutil.rmtree(image.parent)


def test_a_server_finishes_its_run_from_a_log_torn_at_any_byte(tmp_path: Path) -> None:
    randomness = Random(12)
    (tmp_path / "live").mkdir()
    data = tmp_path / "live" / "data"
    with a_site() as site, a_server(data) as server:
        tasks = [{"url": url} for url in site.urls(PAGES)]
        body = {"tasks": tasks, "max_inflight": 20}
        job_id = server.call("POST", "/v1/jobs", json=body).json()["job_id"]
        keep_bytes, base = (data / WAL).stat().st_size, (data / "conveyor.db").read_bytes()
        until("half of it", partial(_half, server, job_id))
        images = [_image(server, tmp_path / f"image-{number}" / "data") for number in range(IMAGES)]
        server.kill()
        # No checkpoint may have run: the log must contain all commits that may be torn.
        assert (images[-1] / "conveyor.db").read_bytes() == base

        for image in images:
            at = tear_log(image, randomness, keep_bytes=keep_bytes)
            lost = tear_packs(image, randomness)
            with a_server(image) as heir:
                run = until("the run to end", partial(heir.ended_run, job_id))
            assert run["stats"]["completed"] == run["stats"]["total"] == PAGES, (at, lost)
            assert violations(image) == [], (at, lost)
            shutil.rmtree(image.parent)


def _half(server: Server, job_id: str) -> dict[str, Any] | None:
    run: dict[str, Any] = server.call("GET", f"/v1/jobs/{job_id}").json()["latest_run"]
    return run if run["stats"]["completed"] * 2 >= PAGES else None


def _image(server: Server, into: Path) -> Path:
    """Copies the data directory as `kill -9` would leave it at this moment."""
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        shutil.copytree(server.data_dir, into, ignore=shutil.ignore_patterns("*.sock"))
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    return into


def _tear(image: Path, randomness: Random) -> None:
    """Adds a partial write to the log and to each pack, and an unfinished body."""
    torn = [image / "conveyor.db-wal", *(image / "blobs").rglob("*.,*")]
    for path in torn:
        with path.open("ab") as file:
            file.write(randomness.randbytes(randomness.randrange(1, 5_000)))
    (image / "temp" / "half").write_bytes(randomness.randbytes(100))
