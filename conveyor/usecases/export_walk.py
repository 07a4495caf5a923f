"""Walk: once over the tasks of a run: rows by the page, bodies by the group (SPEC.md 4.19).

What is in memory at any time is one page of rows, and one group of bodies with what became of it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

import msgspec
import trio

from conveyor.domain import exporting
from conveyor.domain.changes import Applied
from conveyor.domain.errors import ConveyorError
from conveyor.domain.export import Export, Manifest, Tally
from conveyor.domain.formats import ENCODERS
from conveyor.domain.formats.entry import DamagedBody, Entry
from conveyor.domain.lifecycle import TASK_TERMINAL
from conveyor.domain.model import Format, Run, Task
from conveyor.ports.errors import BlobMissing, StorageDamaged, Unavailable
from conveyor.usecases.env import Env
from conveyor.usecases.expiry import Expiries
from conveyor.usecases.walking import pages_of

_PAGE = 500
_GROUP_TASKS = 64
_GROUP_BYTES = 4 * 1024 * 1024
_BEAT_S = 2.0


class Fenced(ConveyorError):
    """Somebody else has taken the export up, or it was deleted."""


class Walk:
    """The makings of one file; `manifest` is right once all pieces are out."""

    def __init__(
        self, env: Env, export: Export, run: Run, body_format: Format, expiries: Expiries
    ) -> None:
        self._env = env
        self._export = export
        self._run = run
        self._format = body_format
        self._expiries = expiries
        self._encoder = ENCODERS[export.format](export)
        self._tally = Tally()
        self._beat_at = env.now()

    def manifest(self) -> Manifest:
        return Manifest(
            export_id=self._export.export_id,
            job_id=self._export.job_id,
            run_id=self._export.run_id,
            format=self._export.format,
            created_at=self._export.created_at,
            tasks=self._export.total,
            entries=self._tally.entries,
            counts=self._tally.counts,
            body_bytes=self._tally.body_bytes,
            entries_sha256=self._tally.sha256,
        )

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        encoder = self._encoder
        yield encoder.begin()
        async with aclosing(self._encoded()) as pieces:
            async for piece in pieces:
                yield piece
        if encoder.has_listing:
            async with aclosing(self._pages()) as pages:
                async for page in pages:
                    yield await self._env.aside.do(partial(encoder.list, page))
        yield await self._env.aside.do(partial(encoder.end, self.manifest()))

    async def _encoded(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._pages()) as pages:
            async for page in pages:
                for group in _groups(page):
                    filled = await self._with_bodies(group)
                    yield await self._env.aside.do(partial(self._encoder.encode, filled))
                    self._count(filled)
                    await self._beat()

    def _count(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._tally.take(entry.task.task_id, entry.status, entry.size_bytes, entry.sha256)

    async def _pages(self) -> AsyncGenerator[list[Entry], None]:
        walk = pages_of(self._env, self._run, statuses=TASK_TERMINAL, limit=_PAGE)
        async with aclosing(walk) as pages:
            async for page in pages:
                await self._beat()
                yield [self._entry(task) for task in page]

    def _entry(self, task: Task) -> Entry:
        return Entry(task, self._format, self._expiries.is_over(task))

    async def _with_bodies(self, entries: Sequence[Entry]) -> list[Entry]:
        filled = list(entries)
        failures: list[ConveyorError] = []

        async def fill(at: int, entry: Entry) -> None:
            try:
                body = await _body(self._env, entry.task)
            except (Unavailable, DamagedBody) as error:
                failures.append(error)
            else:
                filled[at] = msgspec.structs.replace(entry, body=body)

        async with trio.open_nursery() as nursery:
            for at, entry in enumerate(entries):
                if entry.has_body and self._encoder.needs_bodies:
                    nursery.start_soon(fill, at, entry)
        for failure in failures:
            if isinstance(failure, DamagedBody):
                raise failure
        if failures:
            raise failures[0]
        return filled

    async def _beat(self) -> None:
        """Tells how far it is, and finds out whether it is still ours."""
        now = self._env.now()
        if now < self._beat_at + _BEAT_S:
            return
        self._beat_at = now
        change = exporting.beat(self._export, done=self._tally.entries, now=now)
        if not isinstance(await self._env.commit(change), Applied):
            raise Fenced(self._export.export_id)


def _groups(page: Sequence[Entry]) -> list[list[Entry]]:
    """Neighbours whose bodies fit into memory together; a large one is alone."""
    groups: list[list[Entry]] = [[]]
    size_bytes = 0
    for entry in page:
        is_full = size_bytes + entry.size_bytes > _GROUP_BYTES or len(groups[-1]) == _GROUP_TASKS
        if groups[-1] and is_full:
            groups.append([])
            size_bytes = 0
        groups[-1].append(entry)
        size_bytes += entry.size_bytes
    return groups


async def _body(env: Env, task: Task) -> bytes:
    """DamagedBody names the task whose body is not there or cannot be read."""
    assert task.result is not None
    try:
        async with aclosing(env.blobs.open(task.result.key)) as pieces:
            return b"".join([piece async for piece in pieces])
    except BlobMissing:
        raise DamagedBody(f"the stored body of task {task.task_id} is missing") from None
    except StorageDamaged:
        raise DamagedBody(f"the stored body of task {task.task_id} cannot be read") from None
