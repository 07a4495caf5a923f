"""Wrappers that make one call of a real engine fail, before or after it takes effect."""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

from conveyor.domain.changes import Change, Chunk, Key, R, Verdict
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.model import TaskRef
from conveyor.domain.queries import Q, Query, TaskPage, TasksOf
from conveyor.ports.blobs import Blobs, Stored
from conveyor.ports.errors import Unavailable
from conveyor.ports.queue import Depth, Message, Queue
from conveyor.ports.store import Store
from conveyor.usecases.context import Context

T = TypeVar("T")


class When(Enum):
    """Whether the failed call took effect."""

    BEFORE = "nothing happened"
    AFTER = "it happened, and the answer was lost"


@dataclass(slots=True)
class Fault:
    """Makes call number `at` of store, queue and blobs fail, or of the method `only`. Later calls
    succeed."""

    at: int
    when: When
    only: str | None = None
    calls: int = 0

    @property
    def was_reached(self) -> bool:
        """False once `at` is larger than the number of calls, so every call has failed once."""
        return self.calls >= self.at

    async def through(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        counts = self.only in {None, name}
        self.calls += counts
        fails = counts and self.calls == self.at
        if fails and self.when is When.BEFORE:
            self._fail()
        answer = await call()
        if fails:
            self._fail()
        return answer

    def _fail(self) -> None:
        raise Unavailable(f"call {self.at} failed: {self.when.value}")


def with_fault(env: Context, fault: Fault) -> Context:
    """The same ports, with the fault around store, queue and blobs."""
    return replace(
        env,
        store=FaultyStore(env.store, fault),
        queue=FaultyQueue(env.queue, fault),
        blobs=FaultyBlobs(env.blobs, fault),
    )


@dataclass(frozen=True, slots=True)
class FaultyStore:
    inner: Store
    fault: Fault

    async def read(self, key: Key[R]) -> R | None:
        return await self.fault.through("read", lambda: self.inner.read(key))

    async def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        return await self.fault.through("commit", lambda: self.inner.commit(changes))

    async def put_chunk(self, chunk: Chunk) -> Verdict:
        return await self.fault.through("put_chunk", lambda: self.inner.put_chunk(chunk))

    async def find(self, query: Query[Q]) -> list[Q]:
        return await self.fault.through("find", lambda: self.inner.find(query))

    async def page_tasks(self, query: TasksOf, *, read_max: int) -> TaskPage:
        return await self.fault.through(
            "page_tasks", lambda: self.inner.page_tasks(query, read_max=read_max)
        )

    async def delete_run_rows(self, job_id: JobId, run_id: RunId | None, *, limit: int) -> int:
        return await self.fault.through(
            "scrub", lambda: self.inner.delete_run_rows(job_id, run_id, limit=limit)
        )

    async def delete_expired(self, now: float) -> int:
        return await self.fault.through("purge", lambda: self.inner.delete_expired(now))


@dataclass(frozen=True, slots=True)
class FaultyQueue:
    inner: Queue
    fault: Fault

    async def open_run(self, run_id: RunId) -> None:
        await self.fault.through("open_run", lambda: self.inner.open_run(run_id))

    async def close_run(self, run_id: RunId) -> None:
        await self.fault.through("close_run", lambda: self.inner.close_run(run_id))

    async def send(self, refs: Sequence[TaskRef]) -> None:
        await self.fault.through("send", lambda: self.inner.send(refs))

    async def receive(self, run_id: RunId, *, count_max: int, visibility_s: float) -> list[Message]:
        return await self.fault.through(
            "receive",
            lambda: self.inner.receive(run_id, count_max=count_max, visibility_s=visibility_s),
        )

    async def extend(self, messages: Sequence[Message], *, visibility_s: float) -> frozenset[str]:
        return await self.fault.through(
            "extend", lambda: self.inner.extend(messages, visibility_s=visibility_s)
        )

    async def ack(self, messages: Sequence[Message]) -> None:
        await self.fault.through("ack", lambda: self.inner.ack(messages))

    async def bounce(self, messages: Sequence[Message], *, delay_s: float) -> None:
        await self.fault.through("bounce", lambda: self.inner.bounce(messages, delay_s=delay_s))

    async def depth(self, run_id: RunId) -> Depth:
        return await self.fault.through("depth", lambda: self.inner.depth(run_id))


@dataclass(frozen=True, slots=True)
class FaultyBlobs:
    inner: Blobs
    fault: Fault

    async def add(self, prefix: str, name: str, parts: Sequence[bytes]) -> Stored:
        return await self.fault.through("add", lambda: self.inner.add(prefix, name, parts))

    async def put(self, key: str, parts: Sequence[bytes]) -> Stored:
        return await self.fault.through("put", lambda: self.inner.put(key, parts))

    async def put_stream(self, key: str, pieces: AsyncIterable[bytes]) -> Stored:
        return await self.fault.through("put_stream", lambda: self.inner.put_stream(key, pieces))

    async def copy(self, key: str, to: str, *, bytes_max: int | None = None) -> Stored:
        return await self.fault.through(
            "copy", lambda: self.inner.copy(key, to, bytes_max=bytes_max)
        )

    async def upload_url(self, key: str, *, content_type: str, expires_at: float) -> str | None:
        return await self.inner.upload_url(key, content_type=content_type, expires_at=expires_at)

    async def download_url(
        self, key: str, *, content_type: str, filename: str, expires_at: float
    ) -> str | None:
        return await self.inner.download_url(
            key, content_type=content_type, filename=filename, expires_at=expires_at
        )

    def check_room(self) -> None:
        self.inner.check_room()

    async def open(self, key: str, *, start: int = 0) -> AsyncGenerator[bytes, None]:
        async with aclosing(self.inner.open(key, start=start)) as pieces:
            while True:
                try:
                    piece = await self.fault.through("open", lambda: anext(pieces))
                except StopAsyncIteration:
                    return
                yield piece

    async def delete_prefix(self, prefix: str, *, limit: int | None = None) -> int:
        return await self.fault.through(
            "delete_prefix", lambda: self.inner.delete_prefix(prefix, limit=limit)
        )
