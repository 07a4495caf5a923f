"""Mutants of submits: lists that are not stored, wrong idempotency keys (SPEC.md 4.2)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from conveyor.domain import limits
from conveyor.domain.changes import Change, Guard, RecordKey, Update
from conveyor.domain.errors import Refused
from conveyor.domain.idempotency import KeyVerdict, Request
from conveyor.domain.ids import BatchId, JobId, RunId
from conveyor.domain.model import IdempotencyRecord, StagedList, TaskSpec
from conveyor.ports.errors import Unavailable
from conveyor.simulation.profiles import HASTY_KEYS
from conveyor.simulation.swaps import swap
from conveyor.usecases.context import Context
from conveyor.usecases.idempotency import StoredResponse, ToAnswer, Work
from conveyor.usecases.submit.staging import source_key
from tests.mutants.mutant import Mutant


def _assume_stored(stage: Any) -> Any:
    async def mutated(
        env: Context, job_id: JobId, run_id: RunId, batch_id: BatchId, specs: Sequence[TaskSpec]
    ) -> StagedList:
        try:
            staged: StagedList = await stage(env, job_id, run_id, batch_id, specs)
        except Unavailable:
            key = source_key(job_id, run_id, batch_id)
            return StagedList(key=key, origin_run_id=run_id, origin_batch_id=batch_id)
        return staged

    return mutated


def _use_another_subject(claim_key: Any) -> Any:
    def mutated(
        request: Request, record: IdempotencyRecord | None, *, subject: str, owner: str, now: float
    ) -> Change:
        change: Change = claim_key(request, record, subject=subject, owner=owner, now=now)
        (write,) = change.writes
        if not isinstance(write, Update):
            return change
        values = {**write.values, "subject": subject}
        return Change((msgspec.structs.replace(write, values=values),))

    return mutated


def _never_expire_claim(judge: Any) -> Any:
    def mutated(record: IdempotencyRecord | None, request: Request, *, now: float) -> KeyVerdict:
        if record is not None and 0 < record.claimed_until < now:
            until = now + limits.IDEMPOTENCY_CLAIM_S
            record = msgspec.structs.replace(record, claimed_until=until)
        verdict: KeyVerdict = judge(record, request, now=now)
        return verdict

    return mutated


def _ignore_fingerprint(judge: Any) -> Any:
    def mutated(record: IdempotencyRecord | None, request: Request, *, now: float) -> KeyVerdict:
        if record is not None:
            record = msgspec.structs.replace(record, fingerprint=request.fingerprint)
        verdict: KeyVerdict = judge(record, request, now=now)
        return verdict

    return mutated


def _store_every_refusal(_: Any) -> Any:
    async def mutated(work: Work, subject: str, to_answer: ToAnswer) -> StoredResponse:
        try:
            return await work(subject)
        except Refused as refusal:
            return to_answer(refusal)

    return mutated


def _omit_caller(_: Any) -> Any:
    def key_id(self: Request) -> str:
        scope = "\n".join((self.method, self.path, self.key))
        return hashlib.sha256(scope.encode()).hexdigest()

    return property(key_id)


def _replace_any_answer(_: Any) -> Any:
    def mutated(request: Request, status: int, body: str) -> Change:
        guard = Guard(equals=(("fingerprint", request.fingerprint),))
        values = {"response_status": status, "response_body": body, "claimed_until": 0.0}
        return Change((Update(RecordKey(request.key_id), guard, values),))

    return mutated


MUTANTS = (
    Mutant(
        name="lost_list_taken_for_stored",
        window=1,
        invariants=(1, 2, 13),
        what="A list counts as stored although its write was not answered.",
        apply=swap("conveyor.usecases.submit.staging:stage", _assume_stored),
        world={"at_once_max": 1, "rates": {"call_refused": 0.05}},
    ),
    Mutant(
        name="takeover_makes_another",
        window=88,
        invariants=(3,),
        what="A request that takes over a key from a lost owner creates another job.",
        apply=swap("conveyor.domain.idempotency:claim_key", _use_another_subject),
    ),
    Mutant(
        name="key_claim_never_lapses",
        window=82,
        invariants=(5,),
        what="The claim on a key never expires after its owner is lost.",
        apply=swap("conveyor.domain.idempotency:decide", _never_expire_claim),
    ),
    Mutant(
        name="refusal_for_now_is_kept",
        window=85,
        invariants=(5,),
        what="A refusal with Retry-After is stored and replayed.",
        apply=swap("conveyor.usecases.idempotency:_run_handler", _store_every_refusal),
    ),
    Mutant(
        name="key_of_all_callers",
        window=84,
        invariants=(44,),
        what="A key is scoped by method and path, but not by its caller.",
        apply=swap("conveyor.domain.idempotency:Request.key_id", _omit_caller),
    ),
    Mutant(
        name="key_without_fingerprint",
        window=86,
        invariants=(6,),
        what="A key with another request body gets the answer to the first body.",
        apply=swap("conveyor.domain.idempotency:decide", _ignore_fingerprint),
    ),
    Mutant(
        name="last_answer_stands",
        window=88,
        invariants=(4,),
        what="A slow first request replaces the answer of the request that took over its key.",
        apply=swap("conveyor.domain.idempotency:answer", _replace_any_answer),
        world={
            "limits": HASTY_KEYS,
            "client_speed": 10.0,
            "rates": {"call_slow": 0.05, "client_repeated_at_once": 0.5, "client_repeated": 0.5},
        },
    ),
)
