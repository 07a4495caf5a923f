"""What a process holds does not grow with the jobs that it has made and deleted."""

from __future__ import annotations

import gc
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import trio
from quart.testing.utils import sentinel
from quart_trio import QuartTrio

from conveyor.bootstrap import open_world
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


def _count_ours() -> Counter[str]:
    gc.collect()
    kinds = (type(each) for each in gc.get_objects())
    return Counter(
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in kinds
        if kind.__module__.partition(".")[0] in {"conveyor", "actors"}
    )


async def test_making_and_deleting_jobs_leaves_no_objects_behind(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data", allow_private_targets=True)
    async with open_world(settings, role="dev") as world, trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, _serve_pages, listeners)
        port = listeners[0].socket.getsockname()[1]
        await nursery.start(world.worker().run)
        app = world.app(ready=lambda: True)
        counts = []
        for _ in range(3):
            for _ in range(ROUND):
                await _make_and_delete(app, port)
            # Discovery forgets the mailboxes of ended runs at its next scan.
            await trio.sleep(world.env.policy.cadence.discover_s + 1)
            counts.append(_count_ours())
        nursery.cancel_scope.cancel()

    # An object for each job would be ROUND more a round; caches and pools fill in the first.
    grown = {kind: n for kind, n in (counts[2] - counts[0]).items() if n >= ROUND}
    assert grown == {}
