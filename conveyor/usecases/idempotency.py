"""Idempotency: a POST with a key is performed once, and its response is repeated byte for byte
(SPEC.md 4.2).

The response is stored before it is sent. The subject, the id of what the request creates, is stored
with the claim, so that a later attempt finishes the same object.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import trio

from conveyor.domain import idempotency
from conveyor.domain.changes import Applied, RecordKey
from conveyor.domain.errors import KeyConflict, KeyInProgress, Refused
from conveyor.domain.idempotency import (
    First,
    InProgress,
    KeyReusedWithOtherRequest,
    Replay,
    Request,
)
from conveyor.domain.model import IdempotencyRecord
from conveyor.ports.errors import Unavailable
from conveyor.ports.secret_box import SecretBox
from conveyor.usecases.context import Context


class StoredResponse(msgspec.Struct, frozen=True):
    """A complete response: sent now and replayed later."""

    status: int
    body: str


# How long a failed request may take to release its key. After that the claim lapses after
# IDEMPOTENCY_CLAIM_S, and until then the caller gets 409.
_LET_GO_S = 2.0

Work = Callable[[str], Awaitable[StoredResponse]]
ToAnswer = Callable[[Refused], StoredResponse]


@dataclass(frozen=True, slots=True)
class ResponseSealer:
    """Seals the successful responses of one key while they are stored. Refusals contain no
    secret."""

    vault: SecretBox
    place: str

    def sealing(self, work: Work) -> Work:
        async def sealed(subject: str) -> StoredResponse:
            answer = await work(subject)
            return StoredResponse(
                answer.status, self.vault.seal(answer.body.encode(), place=self.place)
            )

        return sealed

    def open(self, answer: StoredResponse) -> StoredResponse:
        # Only successful responses were sealed.
        if answer.status >= 400:
            return answer
        body = self.vault.unseal(answer.body, place=self.place).decode()
        return StoredResponse(answer.status, body)


async def run_once_per_key(
    env: Context, request: Request, work: Work, to_answer: ToAnswer, *, subject: str | None = None
) -> StoredResponse:
    """Performs `work` for the first request with this key and replays its response to all others.

    `work` gets the id of the object that it creates: `subject`, if no earlier attempt has chosen
    one. After a crash the next request gets the same id and finishes the same object. A final
    refusal is a response too. Any other error releases the key.
    """
    existing = await _begin(env, request, subject or env.new_id())
    if isinstance(existing, StoredResponse):
        return existing
    try:
        answer = await _run_handler(work, existing.subject, to_answer)
    except BaseException:
        # Shielded, because a disconnected client cancels the request. If the release fails too, the
        # claim lapses; the first error is the one to raise.
        with suppress(Unavailable), trio.move_on_after(_LET_GO_S, shield=True):
            await env.commit(idempotency.release(existing))
        raise
    return await _store_response(env, request, answer)


async def _run_handler(work: Work, subject: str, to_answer: ToAnswer) -> StoredResponse:
    """Returns the response, including a final refusal. A refusal with `Retry-After` is raised, so
    that the key is released."""
    try:
        return await work(subject)
    except Refused as refusal:
        if refusal.retry_after_s is not None:
            raise
        return to_answer(refusal)


async def find_key_record(env: Context, key_id: str) -> IdempotencyRecord | None:
    """Reads the record of a key before the whole request has arrived. Only `run_once_per_key`
    decides what it means."""
    record = await env.store.read(RecordKey(key_id))
    return record if record is not None and record.expires_at >= env.now() else None


async def _begin(
    env: Context, request: Request, subject: str
) -> IdempotencyRecord | StoredResponse:
    """Claims the key, or returns the stored response."""
    while True:
        now = env.now()
        record = await env.store.read(RecordKey(request.key_id))
        match idempotency.decide(record, request, now=now):
            case Replay(status, body):
                return StoredResponse(status, body)
            case KeyReusedWithOtherRequest():
                raise KeyConflict("This Idempotency-Key was used with another request.")
            case InProgress(retry_after_s):
                raise KeyInProgress(
                    "The first request with this Idempotency-Key is still running.",
                    retry_after_s=retry_after_s,
                )
            case First():
                # If the guarded claim is refused, another request was faster: read the record
                # again.
                change = idempotency.claim_key(
                    request, record, subject=subject, owner=env.process_id, now=now
                )
                verdict = await env.commit(change)
                if isinstance(verdict, Applied):
                    (claimed,) = verdict.rows
                    assert isinstance(claimed, IdempotencyRecord)
                    return claimed


async def _store_response(env: Context, request: Request, answer: StoredResponse) -> StoredResponse:
    """Stores the response before it is sent. If another attempt stored one first, returns that
    one."""
    verdict = await env.commit(idempotency.answer(request, answer.status, answer.body))
    if isinstance(verdict, Applied):
        return answer
    record = await env.store.read(RecordKey(request.key_id))
    if record is not None and record.response_status is not None:
        return StoredResponse(record.response_status, record.response_body or "")
    return answer
