"""Long bodies over HTTP: a list that is staged while it arrives (docs/api.md, Submitting lists).

A body that breaks off, is no JSON or holds what is refused leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial

from conveyor.api.call import Call, Reply, Work
from conveyor.api.problems import OutOfTime
from conveyor.domain.errors import KeyInProgress, Refused
from conveyor.domain.idempotency import Fingerprint
from conveyor.domain.model import Job, StagedList
from conveyor.ports.errors import Unavailable
from conveyor.usecases import long_lists
from conveyor.usecases.env import Env
from conveyor.usecases.long_lists import Intake, LongList
from conveyor.wire.long_bodies import LongBody

_SLICE_BYTES = 256 * 1024  # Judged in one go, aside: about 20 ms.

# Where the list goes that makes this subject; and what to do once it lies there, if that can be.
Place = Callable[[Call, str], Awaitable[tuple[Job, StagedList]]]
Finish = Callable[[Call, Intake, LongList | None], Work]


@dataclass(frozen=True, slots=True)
class TakesLongLists:
    """How a route takes a list that is too long to be held in memory."""

    place: Place
    finish: Finish


@dataclass(frozen=True, slots=True)
class Arrived:
    """A list that is durable, and the work that will use it."""

    job: Job
    source: StagedList
    work: Work

    def work_as(self, subject: str) -> Work:
        """The work of this subject. If an earlier try turns up late, with one of its own, the next
        call will know it."""

        async def work(given: str) -> Reply:
            return await (self.work if given == subject else put_off)(given)

        return work


async def put_off(_: str) -> Reply:
    raise KeyInProgress("Another try of this request came between.", retry_after_s=1)


async def use_or_drop(env: Env, arrived: Arrived, use: Callable[[], Awaitable[Reply]]) -> Reply:
    """Uses the list, and takes it away if nothing came of it. After an outage nobody knows: then
    it is left for the try that follows."""
    try:
        reply = await use()
    except OutOfTime:
        raise
    except Refused:
        await long_lists.drop_unless_used(env, arrived.job, arrived.source)
        raise
    with suppress(Unavailable):
        await long_lists.drop_unless_used(env, arrived.job, arrived.source)
    return reply


async def arrive(
    call: Call, takes: TakesLongLists, subject: str, pieces: AsyncIterable[bytes]
) -> Arrived:
    """Judges and stages the list as it comes."""
    job, source = await takes.place(call, subject)
    works: list[Work] = []
    async with aclosing(_lines(call, takes, job, source, pieces, works)) as lines:
        await long_lists.stage(call.env, source, lines)
    (work,) = works
    return Arrived(job, source, work)


async def _lines(
    call: Call,
    takes: TakesLongLists,
    job: Job,
    source: StagedList,
    pieces: AsyncIterable[bytes],
    works: list[Work],
) -> AsyncGenerator[bytes, None]:
    body, intake = LongBody(), Intake(call.env, job)
    async with aclosing(_slices(pieces)) as slices:
        async for slice_ in slices:
            if lines := await call.env.aside.do(partial(_step, body, intake, slice_)):
                yield lines
    envelope = replace(call, body=body.end())
    staged = LongList(source, intake.count) if intake.count else None
    works.append(takes.finish(envelope, intake, staged))


async def _slices(pieces: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Gathered and cut: neither is a thread entered for every few bytes, nor for long."""
    gathered = bytearray()
    async for piece in pieces:
        gathered += piece
        while len(gathered) >= _SLICE_BYTES:
            yield bytes(gathered[:_SLICE_BYTES])
            del gathered[:_SLICE_BYTES]
    yield bytes(gathered)


def _step(body: LongBody, intake: Intake, piece: bytes) -> bytes:
    return intake.take(body.feed(piece))


async def fingerprinted(
    start: bytes, rest: AsyncIterable[bytes], fingerprint: Fingerprint
) -> AsyncGenerator[bytes, None]:
    """The whole of a body of which the start was read already."""
    fingerprint.update(start)
    yield start
    async for piece in rest:
        fingerprint.update(piece)
        yield piece
