"""Uploaded lists: reading them line by line from the job's own copy (docs/api.md, Uploaded lists).

A list is always read from its first byte; a resumed ingest skips the lines that are done. That
takes a second or two at the end of a million lines, and works the same for gzip and plain text.
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
from conveyor.domain.model import Job, JobInput, ListSpec, UploadedList
from conveyor.domain.queries import ExpiredInputs
from conveyor.domain.submit.admission import check_growth
from conveyor.domain.submit.list_parser import Line, ListBroken, ListReader, ListTooLarge
from conveyor.ports.blobs import Stored
from conveyor.ports.errors import BlobMissing, BlobTooLarge
from conveyor.usecases.context import Context
from conveyor.usecases.run.results import LetsIn, let_all_in
from conveyor.usecases.submit import staging

# A slice of gzip may inflate to a thousand times its size. Larger slices need more memory; smaller
# ones more switches to the executor.
_SLICE_BYTES = 16 * 1024
# The length of the gzip magic number.
_MAGIC_BYTES = 2


async def groups(env: Context, source: UploadedList) -> AsyncGenerator[list[Line], None]:
    """Yields all lines in groups of `chunk_tasks`. Raises ListUnusable if the list as a whole
    cannot be read."""
    size = env.config.chunk_tasks
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
    """Returns the number of lines: exact for short lists, otherwise an upper bound.

    A count that is too high is corrected when the list is ingested. One that is too low would let
    the run look complete too early. A list that is too large is detected by ingest.
    """
    reader = ListReader(source.spec)
    lines, ends = 0, 0
    try:
        async with aclosing(_slices(env, source)) as slices:
            async for piece in slices:
                # Parsing every line of a long list would delay the response; counting line ends is
                # much cheaper.
                if lines < limits.UPLOAD_EXACT_COUNT_MAX:
                    drafts = reader.feed(piece)
                    while batch := await _take_lines(env, reader, drafts, env.config.chunk_tasks):
                        lines += len(batch)
                elif reader.is_gzip:
                    ends += await env.executor.run(partial(reader.count_ends, piece))
                else:
                    ends += reader.count_ends(piece)
        lines += sum(1 for _ in reader.end())
    except ListTooLarge:
        return limits.TASKS_MAX
    # The last line may have no line end.
    unended = 1 if ends else 0
    return min(lines + ends + unended, limits.TASKS_MAX)


async def _take_lines(
    env: Context, reader: ListReader, lines: Iterator[Line], count_max: int
) -> list[Line]:
    """Returns the next lines; empty after the last. A slice of gzip may inflate to a thousand times
    its size, or to blank lines only, so it is read in the executor."""
    take = partial(_take, lines, count_max)
    return await env.executor.run(take) if reader.is_gzip else take()


def _take(lines: Iterator[Line], count_max: int) -> list[Line]:
    return list(islice(lines, count_max))


async def _slices(env: Context, source: UploadedList) -> AsyncGenerator[bytes, None]:
    size_bytes = 0
    async with aclosing(env.blobs.open(source.key)) as pieces:
        async for piece in pieces:
            # The first bytes alone show whether the list is gzip, before any of it is inflated.
            head_bytes = min(len(piece), _MAGIC_BYTES) if not size_bytes else 0
            if head_bytes:
                yield piece[:head_bytes]
            size_bytes += len(piece)
            for start in range(head_bytes, len(piece), _SLICE_BYTES):
                await trio.lowlevel.checkpoint()
                yield piece[start : start + _SLICE_BYTES]
    # The copy cannot change, so another length means that the storage lost or replaced it.
    if size_bytes != source.size_bytes:
        raise ListBroken("The list is not what it was when it was submitted.")


# File inputs: created, filled, copied into a job, and removed (docs/api.md, Uploaded lists).
#
# An upload is a blob under a key of its file input; a later upload replaces it as a whole. A job
# takes a copy at submit, so no upload and no other job can change what it reads.


POINTER = "/file_input_id"

_PAGE = 200


async def create(env: Context, caller: CallerId, spec: ListSpec, *, input_id: InputId) -> JobInput:
    """Creates the file input, or finds the one that an earlier attempt created."""
    now = env.now()
    slot = JobInput(
        input_id=input_id,
        caller=caller,
        spec=spec,
        created_at=now,
        expires_at=now + limits.INPUT_TTL_S,
    )
    # The verdict is not needed: if the row exists, the next line reads it.
    await env.commit(Change((Insert(InputKey(input_id), slot),)))
    return await own_input(env, caller, input_id)


async def own_input(env: Context, caller: CallerId, input_id: str) -> JobInput:
    """Returns the caller's file input. An unknown, foreign or expired one raises the same
    NotFound."""
    slot = await _live_input(env, input_id)
    if slot is None or slot.caller != caller:
        raise InputNotFound("There is no such file input, or its time is over.")
    return slot


async def input_by_token(
    env: Context, input_id: str, token: str, *, lets_in: LetsIn = let_all_in
) -> JobInput:
    """Returns the file input of a signed upload URL, while the key of its caller is accepted."""
    slot = await _live_input(env, input_id)
    expected = upload_token(env, slot) if slot is not None else ""
    # In constant time, because the token is a secret.
    is_right = hmac.compare_digest(expected.encode(), token.encode())
    if slot is None or not is_right or not lets_in(slot.caller):
        raise InputNotFound("There is no such file input, or its time is over.")
    return slot


async def _live_input(env: Context, input_id: str) -> JobInput | None:
    slot = await env.store.read(InputKey(InputId(input_id))) if is_ulid(input_id) else None
    return slot if slot is not None and env.now() < slot.expires_at else None


def upload_token(env: Context, slot: JobInput) -> str:
    """Returns the token with which the upload URL works without an API key, for the life of the
    file input."""
    return env.secret_box.sign(slot.input_id, purpose="upload")


async def fill(env: Context, slot: JobInput, pieces: AsyncIterable[bytes]) -> Stored:
    """Stores a list in the file input and replaces an earlier one."""
    return await env.blobs.put_stream(slot_key(slot.input_id), pieces)


async def take(env: Context, job: Job, run_id: RunId, input_id: str) -> tuple[UploadedList, int]:
    """Copies an upload for the job and counts its lines. If the list is refused, the copy is
    removed."""
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
    # A direct upload to the bucket did not pass through this server, so its size is checked here.
    except BlobTooLarge:
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
    # Nothing names the copy yet, so only this attempt can remove it.
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
    """Removes file inputs that expired INPUT_GRACE_S ago, so that no upload can still be in
    progress."""
    query = ExpiredInputs(expired_by=env.now() - limits.INPUT_GRACE_S, limit=_PAGE)
    expired = await env.store.find(query)
    for slot in expired:
        await env.blobs.delete_prefix(_slot_prefix(slot.input_id))
        await env.commit(Change((Delete(InputKey(slot.input_id)),)))
    return len(expired)


def slot_key(input_id: InputId) -> str:
    """Returns the key of the blob that is uploaded into a slot."""
    return f"{_slot_prefix(input_id)}/list"


def _slot_prefix(input_id: InputId) -> str:
    return f"inputs/{input_id}"
