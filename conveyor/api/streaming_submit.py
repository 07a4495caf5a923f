"""Requests with long lists: the list is staged while it arrives (docs/api.md, Submitting lists).

A body that is interrupted, is not JSON or contains refused values creates no job and no task.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import aclosing, suppress
from functools import partial

from conveyor.api.server.problem import OutOfTime
from conveyor.api.server.request import RequestContext, Response, Work
from conveyor.domain.errors import KeyInProgress, Refused
from conveyor.domain.idempotency import Fingerprint
from conveyor.domain.model import Job, StagedList
from conveyor.ports.errors import Unavailable
from conveyor.schemas.streaming_tasks import StreamingTaskParser
from conveyor.usecases.submit import staging
from conveyor.usecases.submit.staging import StagedTasks, StreamingValidator

# One call in the executor parses and validates this much, which takes about 20 ms. A larger slice
# blocks other executor work for longer; a smaller one costs more calls.
_SLICE_BYTES = 256 * 1024


class StreamingSubmit(ABC):
    """One request whose list is too long for memory. First `stage` stores the list while it
    arrives, then `finish` runs the work that uses it.

    `resource_id` is the id of what the request creates. A route that accepts long lists has a
    subclass, which knows where the list is stored and what is done with it.
    """

    def __init__(self, call: RequestContext, resource_id: str) -> None:
        self.call = call
        self.resource_id = resource_id
        self._job: Job | None = None
        self._source: StagedList | None = None
        self._work: Work | None = None

    @abstractmethod
    async def locate(self) -> tuple[Job, StagedList]:
        """Returns the job of the list and the key under which the list is stored."""

    @abstractmethod
    def make_work(
        self, body: bytes, validator: StreamingValidator, tasks: StagedTasks | None
    ) -> Work:
        """Returns the work that uses the list, or raises the refusal. `body` is the request
        without the lines of its list. `tasks` is None for an empty list."""

    async def stage(self, pieces: AsyncIterable[bytes]) -> None:
        """Validates and stores the list while it arrives. A list that is refused is not stored."""
        self._job, self._source = await self.locate()
        async with aclosing(self._lines(self._job, self._source, pieces)) as lines:
            await staging.stage_stream(self.call.env, self._source, lines)

    async def finish(self, run: Callable[[Work], Awaitable[Response]]) -> Response:
        """Passes the work to `run`, and then deletes the list if nothing refers to it.

        After an outage or a timeout the outcome is unknown, so the list is kept for the next
        attempt.
        """
        assert self._job is not None
        assert self._source is not None
        delete = partial(staging.delete_if_unreferenced, self.call.env, self._job, self._source)
        try:
            response = await run(self._use)
        except OutOfTime:
            # A subclass of Refused, so it must come first.
            raise
        except Refused:
            await delete()
            raise
        with suppress(Unavailable):
            await delete()
        return response

    async def _lines(
        self, job: Job, source: StagedList, pieces: AsyncIterable[bytes]
    ) -> AsyncGenerator[bytes, None]:
        env = self.call.env
        parser, validator = StreamingTaskParser(), StreamingValidator(env, job)
        async with aclosing(_slices(pieces)) as slices:
            async for slice_ in slices:
                if lines := await env.executor.run(partial(_step, parser, validator, slice_)):
                    yield lines
        # Before the generator ends: an error here makes the storage discard the list.
        tasks = StagedTasks(source, validator.count) if validator.count else None
        self._work = self.make_work(parser.end(), validator, tasks)

    async def _use(self, resource_id: str) -> Response:
        """Runs the work, if the list was staged for `resource_id`.

        If an earlier request with the same Idempotency-Key claimed another id meanwhile, the
        caller must retry; the next request then finds that id.
        """
        assert self._work is not None
        work = self._work if resource_id == self.resource_id else retry_later
        return await work(resource_id)


async def retry_later(_: str) -> Response:
    raise KeyInProgress(
        "Another request with this Idempotency-Key is in progress. Retry later.", retry_after_s=1
    )


async def _slices(pieces: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Regroups the pieces into slices of one size, so that each executor call has enough work
    and none takes long.
    """
    gathered = bytearray()
    async for piece in pieces:
        gathered += piece
        while len(gathered) >= _SLICE_BYTES:
            yield bytes(gathered[:_SLICE_BYTES])
            del gathered[:_SLICE_BYTES]
    yield bytes(gathered)


def _step(parser: StreamingTaskParser, validator: StreamingValidator, piece: bytes) -> bytes:
    return validator.take(parser.feed(piece))


async def hash_while_reading(
    start: bytes, rest: AsyncIterable[bytes], fingerprint: Fingerprint
) -> AsyncGenerator[bytes, None]:
    """Yields the whole body, of which `start` is already read, and hashes it."""
    fingerprint.update(start)
    yield start
    async for piece in rest:
        fingerprint.update(piece)
        yield piece
