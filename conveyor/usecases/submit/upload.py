"""Uploaded lists as lines, from the job's own copy (docs/api.md, Uploaded lists).

A list is always read from its first byte: a walk that goes on skips the lines that are in. That
takes a second or two at the end of a million lines, and is the same for gzip as for plain text.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncGenerator, AsyncIterable, Iterator
from contextlib import aclosing
from functools import partial
from itertools import islice

import trio

from conveyor.domain import limits
from conveyor.domain.changes import Change, Delete, InputKey, Insert
from conveyor.domain.errors import Conflict, InputNotFound, InvalidArgument, Refused
from conveyor.domain.ids import FIRST_BATCH, CallerId, InputId, RunId, is_ulid
from conveyor.domain.model import Job
from conveyor.domain.queries import ExpiredInputs
from conveyor.domain.quota import check_growth
from conveyor.domain.submit.list_parser import Line, ListBroken, ListReader, ListTooLarge
from conveyor.domain.submit.upload import JobInput, ListSpec, UploadedList, slot_key, slot_prefix
from conveyor.ports.blobs import Stored
from conveyor.ports.errors import BlobMissing, BlobTooLarge
from conveyor.usecases.context import Context
from conveyor.usecases.run.blob_download import LetsIn, let_all_in
from conveyor.usecases.submit import staging

_SLICE_BYTES = 16 * 1024  # Of gzip, a slice may inflate to a thousand times as much.
_MAGIC_BYTES = 2


async def groups(env: Context, source: UploadedList) -> AsyncGenerator[list[Line], None]:
    """All lines, in fixed counts; ListUnusable where the list as a whole cannot be taken."""
    size = env.policy.chunk_tasks
    reader = ListReader(source.spec)
    group: list[Line] = []
    async with aclosing(_slices(env, source)) as slices:
        async for piece in slices:
            lines = reader.feed(piece)
            while batch := await _take_lines(env, reader, lines, size - len(group)):
                group += batch
                if len(group) == size:
                    yield group
                    group = []
    group += reader.end()
    for start in range(0, len(group), size):
        yield group[start : start + size]


async def count_lines(env: Context, source: UploadedList) -> int:
    """How many lines the list has: exactly if they are few, else at most.

    A number too high is mended when the list is in; one too low would let the run look complete
    before it is. Whatever is too large is found out when it is ingested.
    """
    reader = ListReader(source.spec)
    lines, ends = 0, 0
    try:
        async with aclosing(_slices(env, source)) as slices:
            async for piece in slices:
                if lines < limits.UPLOAD_EXACT_COUNT_MAX:
                    found = reader.feed(piece)
                    while batch := await _take_lines(env, reader, found, env.policy.chunk_tasks):
                        lines += len(batch)
                elif reader.is_gzip:
                    ends += await env.executor.run(partial(reader.count_ends, piece))
                else:
                    ends += reader.count_ends(piece)
        lines += sum(1 for _ in reader.end())
    except ListTooLarge:
        return limits.TASKS_MAX
    unended = 1 if ends else 0
    return min(lines + ends + unended, limits.TASKS_MAX)


async def _take_lines(
    env: Context, reader: ListReader, lines: Iterator[Line], count_max: int
) -> list[Line]:
    """The next of the lines, empty after the last. A slice of gzip may hold a thousand times as
    much, or blank lines only, so it is inflated and read aside.
    """
    take = partial(_take, lines, count_max)
    return await env.executor.run(take) if reader.is_gzip else take()


def _take(lines: Iterator[Line], count_max: int) -> list[Line]:
    return list(islice(lines, count_max))


async def _slices(env: Context, source: UploadedList) -> AsyncGenerator[bytes, None]:
    size_bytes = 0
    async with aclosing(env.blobs.open(source.key)) as pieces:
        async for piece in pieces:
            # The first bytes alone tell gzip, before any of it is inflated.
            head_bytes = min(len(piece), _MAGIC_BYTES) if not size_bytes else 0
            if head_bytes:
                yield piece[:head_bytes]
            size_bytes += len(piece)
            for start in range(head_bytes, len(piece), _SLICE_BYTES):
                await trio.lowlevel.checkpoint()
                yield piece[start : start + _SLICE_BYTES]
    if size_bytes != source.size_bytes:
        raise ListBroken("The list is not what it was when it was submitted.")


# Slots for uploaded lists: made, filled, taken into a job, and removed in the end
# (docs/api.md, Uploaded lists).
#
# What was put into a slot is a blob under a key of the slot's own; a later upload replaces it as a
# whole. A job takes a copy at submit, so no upload and no other job can change what it reads.


POINTER = "/file_input_id"

_PAGE = 200


async def create(env: Context, caller: CallerId, spec: ListSpec, *, input_id: InputId) -> JobInput:
    """Makes the slot, or finds the one that an earlier try has made."""
    now = env.now()
    slot = JobInput(
        input_id=input_id,
        caller=caller,
        spec=spec,
        created_at=now,
        expires_at=now + limits.INPUT_TTL_S,
    )
    await env.commit(Change((Insert(InputKey(input_id), slot),)))
    return await own_input(env, caller, input_id)


async def own_input(env: Context, caller: CallerId, input_id: str) -> JobInput:
    """The caller's slot; unknown, foreign and expired ones are the same NotFound."""
    slot = await _live_input(env, input_id)
    if slot is None or slot.caller != caller:
        raise InputNotFound("There is no such file input, or its time is over.")
    return slot


async def input_by_token(
    env: Context, input_id: str, token: str, *, lets_in: LetsIn = let_all_in
) -> JobInput:
    """The slot that a signed upload address leads to, while the key of its caller is let in."""
    slot = await _live_input(env, input_id)
    expected = upload_token(env, slot) if slot is not None else ""
    is_right = hmac.compare_digest(expected.encode(), token.encode())
    if slot is None or not is_right or not lets_in(slot.caller):
        raise InputNotFound("There is no such file input, or its time is over.")
    return slot


async def _live_input(env: Context, input_id: str) -> JobInput | None:
    slot = await env.store.read(InputKey(InputId(input_id))) if is_ulid(input_id) else None
    return slot if slot is not None and env.now() < slot.expires_at else None


def upload_token(env: Context, slot: JobInput) -> str:
    """What makes the address of a slot work without a key, for as long as the slot lives."""
    return env.secret_box.sign(slot.input_id, purpose="upload")


async def fill(env: Context, slot: JobInput, pieces: AsyncIterable[bytes]) -> Stored:
    """Puts a list into the slot, in the place of any that was there."""
    return await env.blobs.put_stream(slot_key(slot.input_id), pieces)


async def take(env: Context, job: Job, run_id: RunId, input_id: str) -> tuple[UploadedList, int]:
    """The job's own copy of an upload, and how many lines it has; refused, nothing is left."""
    slot = await own_input(env, job.caller, input_id)
    key = staging.source_key(job.job_id, run_id, FIRST_BATCH)
    try:
        stored = await env.blobs.copy(
            slot_key(slot.input_id), key, bytes_max=limits.UPLOAD_BYTES_MAX
        )
    except BlobMissing:
        raise Conflict(
            "Nothing was uploaded to this file input yet.", code="file_input_not_uploaded"
        ) from None
    except BlobTooLarge:  # Where it went past us, nobody has looked.
        raise InvalidArgument(
            f"The uploaded list has more than {limits.UPLOAD_BYTES_MAX} bytes.", pointer=POINTER
        ) from None
    source = UploadedList(
        key=key,
        spec=slot.spec,
        size_bytes=stored.size_bytes,
        sha256=stored.sha256,
        origin_run_id=run_id,
        origin_batch_id=FIRST_BATCH,
    )
    try:
        total = await _count(env, source)
        check_growth(stored.size_bytes, tasks_count=total, bad_count=0)
        return source, total
    except Refused:
        await env.blobs.delete_prefix(staging.sources_prefix(job.job_id, run_id))
        raise


async def _count(env: Context, source: UploadedList) -> int:
    try:
        count = await count_lines(env, source)
    except ListBroken as error:
        raise InvalidArgument(str(error), pointer=POINTER) from None
    if count == 0:
        raise InvalidArgument("The uploaded list holds no line.", pointer=POINTER)
    return count


async def remove_expired(env: Context) -> int:
    """Removes slots and uploads whose time is over, by so much that no upload can be under way."""
    query = ExpiredInputs(expired_by=env.now() - limits.INPUT_GRACE_S, limit=_PAGE)
    expired = await env.store.find(query)
    for slot in expired:
        await env.blobs.delete_prefix(slot_prefix(slot.input_id))
        await env.commit(Change((Delete(InputKey(slot.input_id)),)))
    return len(expired)
