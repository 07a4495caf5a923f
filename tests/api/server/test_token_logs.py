"""Signed links open without a key: no log has their tokens, whatever comes of the request."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import httpx
import pytest

from conveyor.logs import FORMATTERS
from tests.api.server.test_sockets import served
from tests.api.test_upload import a_slot
from tests.api.world import ANNA, World

pytestmark = pytest.mark.slow


@pytest.fixture
def lines() -> Iterator[list[io.StringIO]]:
    """What every logger would write, of any level, in either style."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    streams = []
    for formatter in FORMATTERS.values():
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(formatter())
        root.addHandler(handler)
        streams.append(stream)
    root.setLevel(logging.DEBUG)
    logging.getLogger("httpx").setLevel(logging.CRITICAL)  # The caller's own.
    logging.getLogger("httpcore").setLevel(logging.CRITICAL)
    yield streams
    root.handlers[:] = before
    root.setLevel(level)


async def test_no_token_of_a_link_is_written_to_a_log(
    world: World, lines: list[io.StringIO]
) -> None:
    job = await world.submit(1)
    (task,) = await world.finish(job)
    (row,) = (await world.get(f"/v1/jobs/{job['job_id']}/results")).json["results"]
    link = "/v1/" + row["result_url"].partition("/v1/")[2]
    slot = await a_slot(world, {"format": "text"})
    upload = "/" + slot["upload"]["url"].split("/", 3)[3]
    tokens = {path.partition("token=")[2] for path in (link, upload)}
    requests = [
        ("GET", link),
        ("HEAD", link),
        ("GET", link.replace(task.task_id, "0" * 32)),
        ("GET", f"{link}&token=again"),
        ("GET", f"{link}&bogus=1"),
        ("GET", link.replace("/content", "/nothing")),
        ("GET", link.replace("token=", "Token=")),
        ("GET", link.replace("token=", "token=%20")),
        ("POST", link),
        ("PUT", upload),
        ("PUT", upload.replace("token=", "token=x")),
        ("GET", upload),
    ]

    async with served(world) as server, httpx.AsyncClient(base_url=server.url) as client:
        for method, path in requests:
            await client.request(method, path, content=b"https://example.com/" * 3)
        assert task.result is None
        stored = await world.tasks_of(job["job_id"], job["latest_run"]["run_id"])
        assert stored[0].result is not None
        await world.env.blobs.put(stored[0].result.key, [b"damaged"])
        damaged = await client.get(link)
        await world.env.blobs.delete_prefix(f"jobs/{job['job_id']}")
        missing = await client.get(link, headers={"X-API-Key": ANNA})

    written = "".join(stream.getvalue() for stream in lines)
    assert (damaged.status_code, missing.status_code) == (500, 404)
    assert written.count("request") >= len(requests)
    for token in tokens:
        assert token not in written
        assert token.rpartition(".")[2] not in written
