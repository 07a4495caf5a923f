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
from conveyor.domain.idempotency import First, InProgress, Misused, Replay, Request
from conveyor.domain.model import KeyRecord
from conveyor.ports.errors import Unavailable
from conveyor.ports.vault import Vault
from conveyor.usecases.env import Env


class Answer(msgspec.Struct, frozen=True):
    """A finished response: what is sent now and replayed later."""

    status: int
    body: str


_LET_GO_S = 2.0

Work = Callable[[str], Awaitable[Answer]]
ToAnswer = Callable[[Refused], Answer]


@dataclass(frozen=True, slots=True)
class Envelope:
    """Seals the good answers of one key while they are kept; refusals hold no secret."""

    vault: Vault
    place: str

    def sealing(self, work: Work) -> Work:
        async def sealed(subject: str) -> Answer:
            answer = await work(subject)
            return Answer(answer.status, self.vault.seal(answer.body.encode(), place=self.place))

        return sealed

    def open(self, answer: Answer) -> Answer:
        if answer.status >= 400:
            return answer
        body = self.vault.unseal(answer.body, place=self.place).decode()
        return Answer(answer.status, body)


async def once(
    env: Env, request: Request, work: Work, to_answer: ToAnswer, *, subject: str | None = None
) -> Answer:
    """Does `work` for the first call with this key and replays its answer to every other.

    `work` is given the id of what it creates: `subject`, if nobody has begun. After a crash the
    next call is given the same id and finishes the same thing. A refusal is an answer too; any
    other error releases the key.
    """
    begun = await _begin(env, request, subject or env.mint())
    if isinstance(begun, Answer):
        return begun
    try:
        answer = await _worked(work, begun.subject, to_answer)
    except BaseException:
        # If this fails too, the claim lapses by itself; what went wrong first is what counts.
        with suppress(Unavailable), trio.move_on_after(_LET_GO_S, shield=True):
            await env.commit(idempotency.let_go(begun))
        raise
    return await _keep(env, request, answer)


async def _worked(work: Work, subject: str, to_answer: ToAnswer) -> Answer:
    """The answer, a final refusal included; a refusal that says when to come back is raised."""
    try:
        return await work(subject)
    except Refused as refusal:
        if refusal.retry_after_s is not None:
            raise
        return to_answer(refusal)


async def begun_as(env: Env, key_id: str) -> KeyRecord | None:
    """What is known of a key before the whole request is; it counts only as far as `once` says."""
    record = await env.store.read(RecordKey(key_id))
    return record if record is not None and record.expires_at >= env.now() else None


async def _begin(env: Env, request: Request, subject: str) -> KeyRecord | Answer:
    """Our claim on the key, or the answer that is there already."""
    while True:
        now = env.now()
        record = await env.store.read(RecordKey(request.key_id))
        match idempotency.judge(record, request, now=now):
            case Replay(status, body):
                return Answer(status, body)
            case Misused():
                raise KeyConflict("This Idempotency-Key was used with another request.")
            case InProgress(retry_after_s):
                raise KeyInProgress(
                    "The first request with this Idempotency-Key is still running.",
                    retry_after_s=retry_after_s,
                )
            case First():
                change = idempotency.claim_key(
                    request, record, subject=subject, owner=env.owner, now=now
                )
                verdict = await env.commit(change)
                if isinstance(verdict, Applied):
                    (claimed,) = verdict.rows
                    assert isinstance(claimed, KeyRecord)
                    return claimed


async def _keep(env: Env, request: Request, answer: Answer) -> Answer:
    """Stores the answer before anybody hears it; if another try stored one first, that stands."""
    verdict = await env.commit(idempotency.answer(request, answer.status, answer.body))
    if isinstance(verdict, Applied):
        return answer
    record = await env.store.read(RecordKey(request.key_id))
    if record is not None and record.response_status is not None:
        return Answer(record.response_status, record.response_body or "")
    return answer
