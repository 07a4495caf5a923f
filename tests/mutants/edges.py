"""Probes of partitions, spend, host limits and syncs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import trio

from actors.poller.host_limiter import HostLimiter
from conveyor.domain.model import HostLimit, HostLimits, Result
from conveyor.domain.run.settlement import Claimed
from conveyor.engines.executor import sync_directory
from conveyor.engines.sqlite import blobs, pack_files
from conveyor.ports.gateway import Scraped
from conveyor.simulation.faults.power_cut import SyncLog
from conveyor.usecases.context import Context
from conveyor.usecases.run import tasks
from tests.builders import a_job, a_ref, a_task

PAGE = Scraped(status=200, content_type="text/html", body=b"page", credits=5)


async def a_partition(env: Context) -> object:
    await trio.lowlevel.checkpoint()
    return tasks.request_for(env, a_job(), Claimed(a_task())).partition


async def a_paid_success(env: Context) -> object:
    await trio.lowlevel.checkpoint()
    result = Result("body.1", 4, "digest", "text/html", 200)
    return tasks.judge_success(env, a_ref(), a_task(), PAGE, result).change.writes[1]


async def a_host_pool(env: Context) -> object:
    await trio.lowlevel.checkpoint()
    narrow = HostLimits(HostLimit(concurrency=1))
    limiter: Any = SimpleNamespace(_job=a_job(max_inflight=9), _limits=narrow)
    return HostLimiter._pool(limiter, "slow.example")


async def a_pack_after_a_power_cut(env: Context) -> object:
    await trio.lowlevel.checkpoint()
    with tempfile.TemporaryDirectory() as root:
        log = SyncLog(root)
        executor: Any = None  # The probe starts no thread.
        store = pack_files.PackFiles(root, Random(1), _make, executor, check_room=_check_nothing)
        with log.recording():
            sync_directory(root)
            store._write("run", [[b"body"]])
            _sync(root)
        store.close()
        log.lose_unsynced()
        return sorted(path.stat().st_size for path in Path(root).rglob("pack*"))


async def a_body_after_a_power_cut(env: Context) -> object:
    await trio.lowlevel.checkpoint()
    with tempfile.TemporaryDirectory() as root:
        log = SyncLog(root)
        put: Any = SimpleNamespace(descriptor=_open(f"{root}/body"))
        with log.recording():
            blobs._sync(put)
            _sync(root)
        log.lose_unsynced()
        return Path(root, "body").read_bytes()


def _make(path: str) -> None:
    Path(path).mkdir()


def _check_nothing(size_bytes: int) -> None:
    """Accepts any size: the disk has room."""


def _open(path: str) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, b"body")
    return descriptor


def _sync(directory: str) -> None:
    """Syncs a directory as the product does without a mutant."""
    descriptor = os.open(directory, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


EDGE_PROBES: dict[str, Callable[[Context], Awaitable[object]]] = {
    "connections_shared_by_callers": a_partition,
    "page_not_in_spend": a_paid_success,
    "host_limits_ignored": a_host_pool,
    "pack_name_not_synced": a_pack_after_a_power_cut,
    "pack_bytes_not_synced": a_pack_after_a_power_cut,
    "body_bytes_not_synced": a_body_after_a_power_cut,
}
