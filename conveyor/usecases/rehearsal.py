"""Rehearsal: a use case run for real up to its first commit, which does not happen
(docs/api.md, Dry run).

So a dry run is refused for the very reasons, and in the very order, that the real call would be.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from conveyor.domain.changes import Change, Chunk, Insert, Key, R, Verdict
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.model import Run
from conveyor.domain.queries import Q, Query, TaskPage, TasksOf
from conveyor.domain.schedules import Schedule
from conveyor.ports.blobs import Blobs, Stored
from conveyor.ports.errors import BlobTooLarge
from conveyor.ports.store import Store
from conveyor.usecases.env import Env


class WouldCommit(Exception):
    """What would have been committed; on purpose no error that a use case knows."""

    def __init__(self, changes: Sequence[Change]) -> None:
        super().__init__("a rehearsal ends here")
        self.changes = changes


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What would be begun: a run, or a schedule for runs to come."""

    run: Run | None = None
    schedule: Schedule | None = None

    @property
    def planned(self) -> int:
        if self.run is not None:
            return self.run.planned
        return 0 if self.schedule is None else self.schedule.total


async def rehearse(env: Env, work: Callable[[Env], Awaitable[object]]) -> Rehearsed:
    """What the work would begin; whatever it is refused for comes through."""
    try:
        await work(replace(env, store=_ReadOnlyStore(env), blobs=_PretendedBlobs(env.blobs)))
    except WouldCommit as reached:
        inserts = [
            write
            for change in reached.changes
            for write in change.writes
            if isinstance(write, Insert)
        ]
        runs = [write.row for write in inserts if isinstance(write.row, Run)]
        schedules = [write.row for write in inserts if isinstance(write.row, Schedule)]
        return Rehearsed(next(iter(runs), None), next(iter(schedules), None))
    return Rehearsed()


class _ReadOnlyStore:
    def __init__(self, env: Env) -> None:
        self._inner: Store = env.store
        self._blobs = env.blobs

    async def read(self, key: Key[R]) -> R | None:
        return await self._inner.read(key)

    async def find(self, query: Query[Q]) -> list[Q]:
        return await self._inner.find(query)

    async def page_tasks(self, query: TasksOf, *, read_max: int) -> TaskPage:
        return await self._inner.page_tasks(query, read_max=read_max)

    async def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        self._blobs.check_room()  # A full disk refuses new work.
        raise WouldCommit(changes)

    async def put_chunk(self, chunk: Chunk) -> Verdict:
        raise WouldCommit(())

    async def scrub(self, job_id: JobId, run_id: RunId | None, *, limit: int) -> int:
        raise WouldCommit(())

    async def purge(self, now: float) -> int:
        raise WouldCommit(())


class _PretendedBlobs:
    """Nothing is stored; a copy is read where its original lies."""

    def __init__(self, inner: Blobs) -> None:
        self._inner = inner
        self._originals: dict[str, str] = {}
        self.check_room = inner.check_room
        self.upload_url = inner.upload_url
        self.download_url = inner.download_url

    async def put(self, key: str, parts: Sequence[bytes]) -> Stored:
        self.check_room()
        body = b"".join(parts)
        return Stored(key, len(body), hashlib.sha256(body).hexdigest())

    async def add(self, prefix: str, name: str, parts: Sequence[bytes]) -> Stored:
        return await self.put(f"{prefix}/{name}", parts)

    async def put_stream(self, key: str, pieces: AsyncIterable[bytes]) -> Stored:
        self.check_room()
        digest, size_bytes = hashlib.sha256(), 0
        async for piece in pieces:
            digest.update(piece)
            size_bytes += len(piece)
        return Stored(key, size_bytes, digest.hexdigest())

    async def copy(self, key: str, to: str, *, bytes_max: int | None = None) -> Stored:
        self._originals[to] = key
        async with aclosing(self.open(key)) as pieces:
            return await self.put_stream(to, _bounded(pieces, to, bytes_max))

    async def open(self, key: str, *, start: int = 0) -> AsyncGenerator[bytes, None]:
        original = self._originals.get(key, key)
        async with aclosing(self._inner.open(original, start=start)) as pieces:
            async for piece in pieces:
                yield piece

    async def delete_prefix(self, prefix: str, *, limit: int | None = None) -> int:
        return 0


async def _bounded(
    pieces: AsyncIterable[bytes], key: str, bytes_max: int | None
) -> AsyncGenerator[bytes, None]:
    seen_bytes = 0
    async for piece in pieces:
        seen_bytes += len(piece)
        if bytes_max is not None and seen_bytes > bytes_max:
            raise BlobTooLarge(key)
        yield piece
