"""Mutants of claims, fetches and settles: owner, count and order (SPEC.md 4.4)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from conveyor.domain import lifecycle
from conveyor.domain.changes import Change, Guard, Update
from conveyor.domain.lifecycle import TaskEvent
from conveyor.domain.model import CounterState, Problem, Result, Task, TaskRef, TaskStatus
from conveyor.domain.run import settlement
from conveyor.domain.run.settlement import Claim, Claimed, Settled
from conveyor.ports.errors import Unavailable
from conveyor.ports.gateway import Scraped
from conveyor.ports.queue import Message
from conveyor.simulation.profiles import SHORT_LIVES
from conveyor.simulation.swaps import swap, swap_constant
from conveyor.usecases.context import Context
from tests.mutants.mutant import Mutant

_ANY_COUNTER_STATE = Guard(status_in=frozenset(CounterState))


def _ignore_claim(mine: Any) -> Any:
    def mutated(task: Task, event: str) -> Guard:
        return Guard(status_in=mine(task, event).status_in)

    return mutated


def _ignore_status(_: Any) -> Any:
    def mutated(task: Task, event: str) -> Guard:
        return Guard()

    return mutated


def _claim_held_task(taken: Any) -> Any:
    def mutated(ref: TaskRef, sources: frozenset[TaskStatus], attempts: int, now: float) -> Update:
        update: Update = taken(ref, sources, attempts, now)
        guard = msgspec.structs.replace(update.guard, lapsed=None)
        return msgspec.structs.replace(update, guard=guard)

    return mutated


def _omit_attempt(settle: Any) -> Any:
    def mutated(
        ref: TaskRef,
        task: Task,
        event: str,
        values: dict[str, Any],
        counts: dict[str, int],
        ending: Any,
    ) -> Change:
        flip, count = settle(ref, task, event, values, counts, ending).writes
        deltas = {name: delta for name, delta in flip.deltas.items() if name != "attempts"}
        return Change((msgspec.structs.replace(flip, deltas=deltas), count))

    return mutated


def _never_give_up(_: Any) -> Any:
    def mutated(task: Task) -> Problem | None:
        return None

    return mutated


def _ack_before_commit(commit: Any) -> Any:
    async def mutated(self: Any, group: Sequence[Any]) -> Any:
        messages = [settle.message for settle in group if settle.message is not None]
        if messages:
            await self.env.queue.ack(messages)
        return await commit(self, group)

    return mutated


def _assume_settled(_: Any) -> Any:
    async def mutated(self: Any, group: Sequence[Any]) -> Any:
        try:
            verdicts = await self.env.store.commit([settle.change for settle in group])
        except Unavailable:
            return [Settled(None) for _ in group]
        return [
            settlement.settle_result(verdict, settle.task)
            for verdict, settle in zip(verdicts, group, strict=True)
        ]

    return mutated


def _send_new_message(_: Any) -> Any:
    async def mutated(self: Any, work: Any, delay_s: float) -> float:
        await self.env.queue.ack((work.message,))
        await self.env.queue.send((work.message.ref,))
        return delay_s

    return mutated


def _omit_claim_from_key(_: Any) -> Any:
    async def mutated(env: Context, ref: TaskRef, claimed: Claimed, scraped: Scraped) -> Result:
        key = f"jobs/{ref.job_id}/runs/{ref.run_id}/{ref.task_id}"
        stored = await env.blobs.put(key, (scraped.body,))
        return Result(
            stored.key, stored.size_bytes, stored.sha256, scraped.content_type, scraped.status
        )

    return mutated


def _assume_stored(store_body: Any) -> Any:
    async def mutated(env: Context, ref: TaskRef, claimed: Claimed, scraped: Scraped) -> Result:
        try:
            result: Result = await store_body(env, ref, claimed, scraped)
        except Unavailable:
            key = f"jobs/{ref.job_id}/runs/{ref.run_id}/{ref.task_id}.{claimed.claim_id}"
            digest = hashlib.sha256(scraped.body).hexdigest()
            size = len(scraped.body)
            return Result(key, size, digest, scraped.content_type, scraped.status)
        return result

    return mutated


def _renew_lease_only(_: Any) -> Any:
    async def mutated(self: Any, held: Sequence[Any]) -> frozenset[str]:
        return frozenset()

    return mutated


def _ignore_first_write(_: Any) -> Any:
    def mutated(event: TaskEvent, claim: int) -> frozenset[TaskStatus]:
        return lifecycle.sources(lifecycle.TASK, event)

    return mutated


def _keep_claim_0(_: Any) -> Any:
    def mutated(task: Task) -> dict[str, int]:
        return {}

    return mutated


def _remove_guard(extend_claim: Any) -> Any:
    def mutated(ref: TaskRef, task: Task, *, now: float) -> Change:
        (update,) = extend_claim(ref, task, now=now).writes
        return Change((msgspec.structs.replace(update, guard=Guard()),))

    return mutated


def _treat_as_first_delivery(take: Any) -> Any:
    async def mutated(env: Context, messages: Sequence[Message]) -> list[Claim]:
        first = [msgspec.structs.replace(message, receives=1) for message in messages]
        claims: list[Claim] = await take(env, first)
        return claims

    return mutated


MUTANTS = (
    Mutant(
        name="settle_under_any_claim",
        window=57,
        invariants=(15, 16),
        what="A worker that has lost its claim settles the task of the current claimant.",
        apply=swap("conveyor.domain.run.settlement:_mine", _ignore_claim),
        world={"workers_count": 2, "limits": SHORT_LIVES, "rates": {"call_slow": 0.1}},
    ),
    Mutant(
        name="settle_in_any_state",
        window=55,
        invariants=(14, 21, 22),
        what="A repeated settle is counted again.",
        apply=swap("conveyor.domain.run.settlement:_mine", _ignore_status),
    ),
    Mutant(
        name="settle_through_shut_gates",
        window=68,
        invariants=(24,),
        what="Tasks settle in a run that has ended.",
        apply=swap_constant("conveyor.domain.run.settlement:_TAKES_OUTCOMES", _ANY_COUNTER_STATE),
    ),
    Mutant(
        name="held_task_claimed",
        window=51,
        invariants=(17,),
        what="A task is claimed although another worker has a live claim on it.",
        apply=swap("conveyor.domain.run.settlement:_claim_update", _claim_held_task),
    ),
    Mutant(
        name="tries_not_counted",
        window=59,
        invariants=(16,),
        what="A failing task is attempted for ever.",
        apply=swap("conveyor.domain.run.settlement:_settle", _omit_attempt),
    ),
    Mutant(
        name="lost_workers_not_counted",
        window=59,
        invariants=(16,),
        what="A task that kills its workers is attempted for ever.",
        apply=swap("conveyor.domain.run.settlement:lost_workers_problem", _never_give_up),
        world={"client_speed": 10.0},
    ),
    Mutant(
        name="ack_before_settle",
        window=61,
        invariants=(19,),
        what="A message is acknowledged before its task is settled.",
        apply=swap("actors.shard_writer:ShardWriter._commit", _ack_before_commit),
    ),
    Mutant(
        name="unknown_settle_is_done",
        window=62,
        invariants=(19,),
        what="A settle without an answer counts as done.",
        apply=swap("actors.shard_writer:ShardWriter._commit", _assume_settled),
    ),
    Mutant(
        name="retry_by_another_message",
        window=58,
        invariants=(19,),
        what="For a retry the message is acknowledged and a new one sent.",
        apply=swap("actors.task_runner:TaskRunner._put_back", _send_new_message),
    ),
    Mutant(
        name="body_named_by_task",
        window=54,
        invariants=(18,),
        what="A worker that has lost its claim overwrites the body of the current claimant.",
        apply=swap("conveyor.usecases.run.tasks:store_body", _omit_claim_from_key),
    ),
    Mutant(
        name="lost_body_taken_for_stored",
        window=53,
        invariants=(18,),
        what="A body counts as stored although its write was not answered.",
        apply=swap("conveyor.usecases.run.tasks:store_body", _assume_stored),
    ),
    Mutant(
        name="beat_renews_lease_only",
        window=49,
        invariants=(17,),
        what="A slow fetch loses its message and its claim, and continues.",
        apply=swap("actors.lease_heartbeater:LeaseHeartbeater._renew_rest", _renew_lease_only),
        world={"is_fault_free": True, "limits": SHORT_LIVES, "rates": {"site_dripped": 0.2}},
    ),
    Mutant(
        name="released_claim_settles",
        window=57,
        invariants=(14, 15),
        what="A worker that released its claim settles the task as a first delivery.",
        apply=swap("conveyor.domain.lifecycle:sources_under_claim", _ignore_first_write),
        world={"workers_count": 2, "limits": SHORT_LIVES, "rates": {"call_slow": 0.1}},
    ),
    Mutant(
        name="first_settle_keeps_claim_0",
        window=57,
        invariants=(15,),
        what="The settle of a first delivery does not refuse another first delivery.",
        apply=swap("conveyor.domain.run.settlement:_first_write", _keep_claim_0),
    ),
    Mutant(
        name="heartbeat_without_guard",
        window=49,
        invariants=(14, 17),
        what="A heartbeat extends the claim on a task that was settled or taken over.",
        apply=swap("conveyor.domain.run.settlement:extend_claim", _remove_guard),
        world={"workers_count": 2, "limits": SHORT_LIVES, "rates": {"site_dripped": 0.3}},
    ),
    Mutant(
        name="redelivery_needs_no_claim",
        window=59,
        invariants=(16,),
        what="A redelivered message is fetched under claim 0, so lost workers are not counted.",
        apply=swap("actors.poller.poller:take", _treat_as_first_delivery),
        world={"client_speed": 10.0},
    ),
)
