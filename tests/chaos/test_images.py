"""Crash images: what lies on disk at some moment is enough to go on from, however it is torn."""

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


def test_every_image_of_a_working_directory_is_one_to_go_on_from(tmp_path: Path) -> None:
    draw = Random(11)
    (tmp_path / "live").mkdir()
    with a_site() as site, a_server(tmp_path / "live" / "data") as server:
        tasks = [{"url": url} for url in site.urls(PAGES)]
        body = {"tasks": tasks, "max_inflight": 20}
        job_id = server.call("POST", "/v1/jobs", json=body).json()["job_id"]
        images = []
        for number in range(IMAGES):
            time.sleep(draw.uniform(0.05, 2.0 * 4 / IMAGES))
            images.append(_image(server, tmp_path / f"image-{number}" / "data"))
        server.kill()

        for image in images:
            _tear(image, draw)
            with a_server(image) as heir:
                run = until("the run to end", partial(heir.ended_run, job_id))
            assert run["stats"]["completed"] == run["stats"]["total"] == PAGES
            assert violations(image) == []
            shutil.rmtree(image.parent)


def test_a_log_that_is_torn_at_any_byte_is_one_to_go_on_from(tmp_path: Path) -> None:
    draw = Random(12)
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
        # Only a log that holds everything since may lose any of it: what was copied out may not.
        assert (images[-1] / "conveyor.db").read_bytes() == base

        for image in images:
            at = tear_log(image, draw, keep_bytes=keep_bytes)
            lost = tear_packs(image, draw)
            with a_server(image) as heir:
                run = until("the run to end", partial(heir.ended_run, job_id))
            assert run["stats"]["completed"] == run["stats"]["total"] == PAGES, (at, lost)
            assert violations(image) == [], (at, lost)
            shutil.rmtree(image.parent)


def _half(server: Server, job_id: str) -> dict[str, Any] | None:
    run: dict[str, Any] = server.call("GET", f"/v1/jobs/{job_id}").json()["latest_run"]
    return run if run["stats"]["completed"] * 2 >= PAGES else None


def _image(server: Server, into: Path) -> Path:
    """What `kill -9` would leave behind right now."""
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        shutil.copytree(server.data_dir, into, ignore=shutil.ignore_patterns("*.sock"))
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    return into


def _tear(image: Path, draw: Random) -> None:
    """Half a write at the end of the log and of each pack, and a body that was never finished."""
    torn = [image / "conveyor.db-wal", *(image / "blobs").rglob("*.,*")]
    for path in torn:
        with path.open("ab") as file:
            file.write(draw.randbytes(draw.randrange(1, 5_000)))
    (image / "temp" / "half").write_bytes(draw.randbytes(100))
