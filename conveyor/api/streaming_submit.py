"""Long bodies over HTTP: stages a list while it arrives (docs/api.md, Submitting lists).

A body that is interrupted, is not JSON or contains refused values creates no job and no task.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from conveyor.api import jobs
from conveyor.api.server.problem import OutOfTime
from conveyor.api.server.request_context import RequestContext, Response, Work
from conveyor.domain.errors import KeyInProgress, Refused
from conveyor.domain.idempotency import Fingerprint
from conveyor.domain.ids import FIRST_BATCH, BatchId, JobId, RunId
from conveyor.domain.model import Job, JobStatus, StagedList
from conveyor.ports.errors import Unavailable
from conveyor.schemas.requests import decode_add_tasks, decode_submit, malformed
from conveyor.schemas.streaming_tasks import StreamingTaskParser
from conveyor.usecases.context import Context
from conveyor.usecases.submit import jobs as job_usecases
from conveyor.usecases.submit import staging
from conveyor.usecases.submit.staging import OnInvalid, StagedTasks, StreamingValidator

# One call in the executor parses and validates this much, which takes about 20 ms. A larger slice
# blocks other executor work for longer; a smaller one costs more calls.
_SLICE_BYTES = 256 * 1024

# `Place` returns the job and the storage key of the list. `Finish` returns the work that uses the
# staged list, or raises the refusal.
Place = Callable[[RequestContext, str], Awaitable[tuple[Job, StagedList]]]
Finish = Callable[[RequestContext, StreamingValidator, StagedTasks | None], Work]


@dataclass(frozen=True, slots=True)
class StreamingList:
    """How a route handles a list that is too long for memory."""

    staging_key: Place
    finish: Finish


@dataclass(frozen=True, slots=True)
class StagedSubmit:
    """A list that is stored durably, and the work that uses it."""

    job: Job
    source: StagedList
    work: Work

    def bind(self, subject: str) -> Work:
        """Returns work that runs only for `subject`, the id that the list was staged for.

        If an earlier request with the same Idempotency-Key claimed another subject meanwhile, the
        caller must retry; the next request then finds that subject.
        """

        async def work(given: str) -> Response:
            return await (self.work if given == subject else retry_later)(given)

        return work


async def retry_later(_: str) -> Response:
    raise KeyInProgress("Another try of this request came between.", retry_after_s=1)


async def use_or_delete(
    env: Context, arrived: StagedSubmit, use: Callable[[], Awaitable[Response]]
) -> Response:
    """Uses the list, and deletes it if nothing refers to it afterwards.

    After an outage or a timeout the outcome is unknown, so the list is kept for the next attempt.
    """
    try:
        reply = await use()
    except OutOfTime:
        # A subclass of Refused, so it must come first.
        raise
    except Refused:
        await staging.delete_if_unreferenced(env, arrived.job, arrived.source)
        raise
    with suppress(Unavailable):
        await staging.delete_if_unreferenced(env, arrived.job, arrived.source)
    return reply


async def stage_stream(
    call: RequestContext, takes: StreamingList, subject: str, pieces: AsyncIterable[bytes]
) -> StagedSubmit:
    """Validates and stages the list while it arrives."""
    job, source = await takes.staging_key(call, subject)
    works: list[Work] = []
    async with aclosing(_lines(call, takes, job, source, pieces, works)) as lines:
        await staging.stage_stream(call.env, source, lines)
    (work,) = works
    return StagedSubmit(job, source, work)


async def _lines(
    call: RequestContext,
    takes: StreamingList,
    job: Job,
    source: StagedList,
    pieces: AsyncIterable[bytes],
    works: list[Work],
) -> AsyncGenerator[bytes, None]:
    body, intake = StreamingTaskParser(), StreamingValidator(call.env, job)
    async with aclosing(_slices(pieces)) as slices:
        async for slice_ in slices:
            if lines := await call.env.executor.run(partial(_step, body, intake, slice_)):
                yield lines
    envelope = replace(call, body=body.end())
    staged = StagedTasks(source, intake.count) if intake.count else None
    works.append(takes.finish(envelope, intake, staged))


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


def _step(body: StreamingTaskParser, intake: StreamingValidator, piece: bytes) -> bytes:
    return intake.take(body.feed(piece))


async def hash_while_reading(
    start: bytes, rest: AsyncIterable[bytes], fingerprint: Fingerprint
) -> AsyncGenerator[bytes, None]:
    """Yields the whole body, of which `start` is already read, and hashes it."""
    fingerprint.update(start)
    yield start
    async for piece in rest:
        fingerprint.update(piece)
        yield piece


# The two routes with long lists: where each one stages its list, and how it uses it
# (docs/api.md, Submitting lists).


async def _place_of_submit(call: RequestContext, subject: str) -> tuple[Job, StagedList]:
    """Makes a provisional job: only the fields that the staging of its lines needs."""
    now = call.env.now()
    job = Job(JobId(subject), call.caller, JobStatus.CLOSED, now, now)
    return job, staging.staging_key(call.env, job, RunId(call.env.new_id()), FIRST_BATCH)


def _submit(call: RequestContext, intake: StreamingValidator, staged: StagedTasks | None) -> Work:
    request = decode_submit(call.body)
    if request.tasks is None and staged is not None:
        raise malformed("it names a long list of tasks twice", pointer="/tasks")
    asked = jobs.submission_from(call, request)
    if staged is not None and request.file_input_id is not None:
        jobs.refuse_both()
    intake.refuse_invalid(asked.on_invalid, asked.params.values)
    intake.refuse_growth(call.sent.size_bytes)
    return jobs.work_of(call, request, msgspec.structs.replace(asked, staged=staged))


async def _place_of_add(call: RequestContext, subject: str) -> tuple[Job, StagedList]:
    return await job_usecases.place_for(call.env, call.caller, call.ids["job_id"], BatchId(subject))


def _add_tasks(
    call: RequestContext, intake: StreamingValidator, staged: StagedTasks | None
) -> Work:
    request = decode_add_tasks(call.body)
    intake.refuse_invalid(OnInvalid[request.on_invalid.upper()], {})
    intake.refuse_growth(call.sent.size_bytes)
    return partial(jobs.run_add_tasks, call, request, staged or ())


SUBMIT = StreamingList(_place_of_submit, _submit)
ADD_TASKS = StreamingList(_place_of_add, _add_tasks)
