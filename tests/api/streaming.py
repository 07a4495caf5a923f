"""Long lists for the API's tests: small ones, in a world that takes them for long."""

from __future__ import annotations

from typing import Any

import pytest

from conveyor.domain import limits
from conveyor.domain.ids import JobId, RunId
from conveyor.engines.memory.blobs import MemoryBlobs
from conveyor.usecases.run import ingest, reconcile
from tests.api.world import World, make_world

COUNT = 40
SYNC_MAX = 30


def a_world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(limits, "LONG_BODY_BYTES", 300)
    return make_world(sync_tasks_max=SYNC_MAX, blobs=ListedBlobs())


class ListedBlobs(MemoryBlobs):
    def keys(self) -> list[str]:
        return sorted(self._bodies)


def lines(count: int = COUNT, **more: Any) -> list[dict[str, Any]]:
    return [{"url": f"https://example.com/{index}", **more} for index in range(count)]


def keyed(key: str) -> dict[str, Any]:
    return {"headers": {"Idempotency-Key": key}}


async def walk(world: World, job_id: str, run_id: str) -> None:
    for batch in await ingest.open_batches_of(world.env, JobId(job_id), RunId(run_id)):
        await reconcile.finish_batch(world.env, batch)


def staged(world: World) -> list[str]:
    assert isinstance(world.env.blobs, ListedBlobs)
    return world.env.blobs.keys()
