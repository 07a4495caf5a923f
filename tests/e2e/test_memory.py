"""Tests that creating and deleting jobs does not increase the memory of a process."""

from __future__ import annotations

import gc
import json
import platform
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import trio
from quart.testing.utils import sentinel
from quart_trio import QuartTrio

from conveyor.bootstrap.runtime import open_runtime
from conveyor.config import Settings

pytestmark = pytest.mark.slow

PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 5\r\n\r\nhello"
ROUND = 16


async def _serve_pages(stream: trio.SocketStream) -> None:
    async with stream:
        async for data in stream:
            await stream.send_all(PAGE * bytes(data).count(b"\r\n\r\n"))


async def _call(app: QuartTrio, method: str, path: str, body: object = None) -> Any:
    headers = {"X-API-Key": "anna", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    client = app.test_client(use_cookies=False)
    response = await client.open(path, method=method, headers=headers, data=data, json=sentinel)
    return json.loads(await response.get_data(as_text=False) or b"{}")


async def _make_and_delete(app: QuartTrio, port: int) -> None:
    tasks = [{"url": f"http://127.0.0.1:{port}/{page}"} for page in range(3)]
    job = await _call(app, "POST", "/v1/jobs", {"tasks": tasks})
    path = f"/v1/jobs/{job['job_id']}"
    while not (await _call(app, "GET", path))["latest_run"]["terminal"]:
        await trio.sleep(0.02)
    await _call(app, "DELETE", path)


def _count_own_objects() -> Counter[str]:
    gc.collect()
    kinds = (type(instance) for instance in gc.get_objects())
    return Counter(
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in kinds
        if kind.__module__.partition(".")[0] in {"conveyor", "actors"}
    )


async def test_deleted_jobs_leave_no_objects_in_memory(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data", allow_private_targets=True)
    async with open_runtime(settings, role="dev") as world, trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, _serve_pages, listeners)
        port = listeners[0].socket.getsockname()[1]
        await nursery.start(world.worker().run)
        app = world.app(ready=lambda: True)
        counts = []
        for _ in range(3):
            for _ in range(ROUND):
                await _make_and_delete(app, port)
            # Queue discovery drops the mailboxes of ended runs at its next scan.
            await trio.sleep(world.env.config.cadence.discover_s + 1)
            counts.append(_count_own_objects())
        nursery.cancel_scope.cancel()

    # One leaked object a job would be ROUND objects a round; caches fill in the first round.
    grown = {kind: n for kind, n in (counts[2] - counts[0]).items() if n >= ROUND}
    assert grown == {}


PROGRAM = """
import os
from conveyor.bootstrap.runtime import tune_memory

def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

if {is_tuned}:
    tune_memory()
blocks = [b"x" * size for size in (500_000, 1_000_000, 2_000_000, 4_000_000)]
del blocks  # From here on, untuned glibc takes such blocks from its heap.
started = rss()
blocks = []
for number in range(60):
    blocks.append((b"x" * (1_000_000 + number), b"x" * (20_000 + number)))
kept = [small for _, small in blocks]  # A heap cannot shrink below the small blocks that it keeps.
del blocks
print(rss() - started)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunes glibc")
def test_the_memory_of_freed_bodies_returns_to_the_system() -> None:
    left = {
        is_tuned: int(
            subprocess.check_output([sys.executable, "-c", PROGRAM.format(is_tuned=is_tuned)])
        )
        for is_tuned in (False, True)
    }

    assert left[False] > 30_000_000, (
        "without the tuning the memory is not kept, so the test proves nothing"
    )
    assert left[True] < 5_000_000
