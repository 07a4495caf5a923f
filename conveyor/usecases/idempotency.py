"""Idempotency: a POST with a key happens once, and its answer is the same for ever
(SPEC.md 4.2)."""

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
    """A finished response: what is sent now and replayed later."""

    status: int
    body: str


_LET_GO_S = 2.0

Work = Callable[[str], Awaitable[StoredResponse]]
ToAnswer = Callable[[Refused], StoredResponse]


@dataclass(frozen=True, slots=True)
class ResponseSealer:
    """Seals the good answers of one key while they are kept; refusals hold no secret."""

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
        if answer.status >= 400:
            return answer
        body = self.vault.unseal(answer.body, place=self.place).decode()
        return StoredResponse(answer.status, body)


async def run_once_per_key(
    env: Context, request: Request, work: Work, to_answer: ToAnswer, *, subject: str | None = None
) -> StoredResponse:
    """Does `work` for the first call with this key and replays its answer to every other.

    `work` is given the id of what it creates: `subject`, if nobody has begun. After a crash the
    next call is given the same id and finishes the same thing. A refusal is an answer too; any
    other error releases the key.
    """
    begun = await _begin(env, request, subject or env.new_id())
    if isinstance(begun, StoredResponse):
        return begun
    try:
        answer = await _run_handler(work, begun.subject, to_answer)
    except BaseException:
        # If this fails too, the claim lapses by itself; what went wrong first is what counts.
        with suppress(Unavailable), trio.move_on_after(_LET_GO_S, shield=True):
            await env.commit(idempotency.release(begun))
        raise
    return await _store_response(env, request, answer)


async def _run_handler(work: Work, subject: str, to_answer: ToAnswer) -> StoredResponse:
    """The answer, a final refusal included; a refusal that says when to come back is raised."""
    try:
        return await work(subject)
    except Refused as refusal:
        if refusal.retry_after_s is not None:
            raise
        return to_answer(refusal)


async def find_key_record(env: Context, key_id: str) -> IdempotencyRecord | None:
    """What is known of a key before the whole request is; it counts only as far as `once` says."""
    record = await env.store.read(RecordKey(key_id))
    return record if record is not None and record.expires_at >= env.now() else None


async def _begin(
    env: Context, request: Request, subject: str
) -> IdempotencyRecord | StoredResponse:
    """Our claim on the key, or the answer that is there already."""
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
                change = idempotency.claim_key(
                    request, record, subject=subject, owner=env.process_id, now=now
                )
                verdict = await env.commit(change)
                if isinstance(verdict, Applied):
                    (claimed,) = verdict.rows
                    assert isinstance(claimed, IdempotencyRecord)
                    return claimed


async def _store_response(env: Context, request: Request, answer: StoredResponse) -> StoredResponse:
    """Stores the answer before anybody hears it; if another try stored one first, that stands."""
    verdict = await env.commit(idempotency.answer(request, answer.status, answer.body))
    if isinstance(verdict, Applied):
        return answer
    record = await env.store.read(RecordKey(request.key_id))
    if record is not None and record.response_status is not None:
        return StoredResponse(record.response_status, record.response_body or "")
    return answer
