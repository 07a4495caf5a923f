"""Slots for uploaded lists: made, filled, taken into a job, and removed in the end
(docs/api.md, Uploaded lists).

What was put into a slot is a blob under a key of the slot's own; a later upload replaces it as a
whole. A job takes a copy at submit, so no upload and no other job can change what it reads.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterable

from conveyor.domain import limits
from conveyor.domain.changes import Change, Delete, InputKey, Insert
from conveyor.domain.errors import Conflict, InputNotFound, InvalidArgument, Refused
from conveyor.domain.ids import FIRST_BATCH, CallerId, InputId, RunId, is_ulid
from conveyor.domain.inputs import JobInput, ListSpec, UploadedList, slot_key, slot_prefix
from conveyor.domain.lists import ListBroken
from conveyor.domain.model import Job
from conveyor.domain.queries import ExpiredInputs
from conveyor.domain.quotas import check_growth
from conveyor.ports.blobs import Stored
from conveyor.ports.errors import BlobMissing, BlobTooLarge
from conveyor.usecases import lists, staging
from conveyor.usecases.env import Env
from conveyor.usecases.links import LetsIn, let_all_in

POINTER = "/file_input_id"

_PAGE = 200


async def create(env: Env, caller: CallerId, spec: ListSpec, *, input_id: InputId) -> JobInput:
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


async def own_input(env: Env, caller: CallerId, input_id: str) -> JobInput:
    """The caller's slot; unknown, foreign and expired ones are the same NotFound."""
    slot = await _live_input(env, input_id)
    if slot is None or slot.caller != caller:
        raise InputNotFound("There is no such file input, or its time is over.")
    return slot


async def input_by_token(
    env: Env, input_id: str, token: str, *, lets_in: LetsIn = let_all_in
) -> JobInput:
    """The slot that a signed upload address leads to, while the key of its caller is let in."""
    slot = await _live_input(env, input_id)
    expected = upload_token(env, slot) if slot is not None else ""
    is_right = hmac.compare_digest(expected.encode(), token.encode())
    if slot is None or not is_right or not lets_in(slot.caller):
        raise InputNotFound("There is no such file input, or its time is over.")
    return slot


async def _live_input(env: Env, input_id: str) -> JobInput | None:
    slot = await env.store.read(InputKey(InputId(input_id))) if is_ulid(input_id) else None
    return slot if slot is not None and env.now() < slot.expires_at else None


def upload_token(env: Env, slot: JobInput) -> str:
    """What makes the address of a slot work without a key, for as long as the slot lives."""
    return env.vault.sign(slot.input_id, purpose="upload")


async def fill(env: Env, slot: JobInput, pieces: AsyncIterable[bytes]) -> Stored:
    """Puts a list into the slot, in the place of any that was there."""
    return await env.blobs.put_stream(slot_key(slot.input_id), pieces)


async def take(env: Env, job: Job, run_id: RunId, input_id: str) -> tuple[UploadedList, int]:
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


async def _count(env: Env, source: UploadedList) -> int:
    try:
        count = await lists.count(env, source)
    except ListBroken as error:
        raise InvalidArgument(str(error), pointer=POINTER) from None
    if count == 0:
        raise InvalidArgument("The uploaded list holds no line.", pointer=POINTER)
    return count


async def remove_expired(env: Env) -> int:
    """Removes slots and uploads whose time is over, by so much that no upload can be under way."""
    query = ExpiredInputs(expired_by=env.now() - limits.INPUT_GRACE_S, limit=_PAGE)
    expired = await env.store.find(query)
    for slot in expired:
        await env.blobs.delete_prefix(slot_prefix(slot.input_id))
        await env.commit(Change((Delete(InputKey(slot.input_id)),)))
    return len(expired)
