"""A random history of calls of an engine, in which each call uses what earlier calls returned.

Calls with random arguments would almost never name a receipt that exists. Here a step names a
method and counts back from the newest row, receipt or claim to choose its arguments. So most
steps have an effect: some use the newest one, some an outdated one. Answers refer to messages
and leases by their number (the third message received), because receipts and lease ids differ by
engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import Any, NamedTuple, TypeVar

from conveyor.domain.changes import (
    AnyKey,
    Applied,
    BatchKey,
    Change,
    Chunk,
    Guard,
    Row,
    SettleChange,
    TaskKey,
    Verdict,
)
from conveyor.domain.ids import LeaseId
from conveyor.domain.lifecycle import (
    COUNTERS,
    RUN,
    TASK,
    CounterEvent,
    RunEvent,
    TaskEvent,
    sources,
    target,
)
from conveyor.domain.model import Batch, CounterState, Task, TaskStatus
from conveyor.ports.coordinator import HostPool
from conveyor.ports.errors import BlobMissing, QueueGone
from conveyor.ports.queue import Message
from tests.builders import (
    ManualClock,
    a_batch,
    a_change,
    a_deletion_intent,
    a_job,
    a_notice,
    a_record,
    a_run,
    a_sample,
    a_schedule,
    a_stats,
    a_task,
    add,
    an_export,
    delete,
    insert,
    key_of,
    ref_to,
    update,
)
from tests.conformance.engines import Engine
from tests.conformance.sample_queries import SHARD_COUNT, make_questions
from tests.conformance.strategies import RUNS, job_of, newest, some_run, stream, with_job, with_jobs

T = TypeVar("T")

OPEN_GATE = frozenset({CounterState.OPEN.value})
NOT_CLOSED = sources(COUNTERS, CounterEvent.CLOSED)


class Step(NamedTuple):
    """A method of `Walker`, and two numbers that choose its arguments."""

    verb: str
    pick: int
    other: int


@dataclass
class Walker:
    """Performs steps and keeps what one worker has received from one engine, oldest first.

    If `rows_overlap`, an ingest step may meet a task row that another change has counted."""

    engine: Engine
    clock: ManualClock
    rows_overlap: bool = True
    batches: list[Batch] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    claims: list[Task] = field(default_factory=list)
    leases: list[LeaseId] = field(default_factory=list)
    keys: dict[AnyKey, None] = field(default_factory=dict)
    blob_keys: dict[str, None] = field(default_factory=dict)

    async def do_nothing(self, pick: int, other: int) -> None:
        """Does nothing. Hypothesis shrinks a step to this if the step does not matter."""

    async def take(self, step: Step) -> object:
        return await VERBS[step.verb](self, step.pick, step.other)

    async def admit(self, pick: int, other: int) -> object:
        job_id, run_id = some_run(pick)
        layout = {"shard_count": SHARD_COUNT, "updated_at": self.clock.now()}
        job = a_job(job_id, **layout)
        run = a_run(run_id, job_id=job_id, sequence=int(run_id), **layout)
        batch = a_batch(run_id, job_id=job_id, epoch=1, updated_at=self.clock.now())
        stats = [a_stats(shard, run_id, job_id=job_id) for shard in range(SHARD_COUNT)]
        if other % 2:
            await self.engine.queue.open_run(run_id)
        return await self._commit(
            [
                a_change(insert(job)),
                a_change(insert(run), insert(batch), *(insert(row) for row in stats)),
            ]
        )

    async def admit_inline(self, pick: int, other: int) -> object:
        job_id, run_id = some_run(pick)
        # The index lies behind the ingest of the opening steps, so the next ingest meets an
        # existing row.
        index = (2 if self.rows_overlap else 100) + pick % 4
        task = a_task(index, run_id, shard=index % SHARD_COUNT, url="https://inline.example")
        stats = a_stats(task.shard, run_id, job_id=job_id)
        gate = Guard(status_in=OPEN_GATE)
        change = a_change(insert(task), add(stats, gate, admitted=1), refs=(ref_to(task, job_id),))
        return await self._commit([change])

    async def ingest(self, pick: int, other: int) -> object:
        batch = newest(self.batches, pick)
        if batch is None:
            return None
        indexes = range(batch.done, batch.done + other % 4)
        tasks = [a_task(index, batch.run_id, shard=index % SHARD_COUNT) for index in indexes]
        self._note(*tasks)
        shards = sorted({task.shard for task in tasks})
        chunk = Chunk(
            key=BatchKey(batch.job_id, batch.run_id, batch.batch_id),
            epoch=batch.epoch,
            done_before=batch.done,
            tasks=tuple(tasks),
            refs=tuple(ref_to(task, batch.job_id) for task in tasks),
            stats={shard: {"admitted": sum(t.shard == shard for t in tasks)} for shard in shards},
            values={"done": batch.done + len(tasks), "updated_at": self.clock.now()},
            gate_in=OPEN_GATE,
        )
        return self._collect(await self.engine.store.put_chunk(chunk))

    async def take_over(self, pick: int, other: int) -> object:
        batch = newest(self.batches, pick)
        if batch is None:
            return None
        guard = Guard(equals=(("epoch", batch.epoch), ("cursor", None)))
        return await self._commit([a_change(update(batch, guard, epoch=batch.epoch + 1))])

    async def claim(self, pick: int, other: int) -> object:
        message = newest(self.messages, pick)
        if message is None:
            return None
        ref = message.ref
        task = await self.engine.store.read(TaskKey.of(ref))
        if task is None:
            return "gone"
        fresh = Guard(equals=(("claim", task.claim),))
        lapsed = Guard(lapsed=("claim_until", self.clock.now()))
        legal = sources(TASK, TaskEvent.CLAIMED)
        guard = Guard(legal, *((fresh.equals, None) if other % 2 else ((), lapsed.lapsed)))
        until = self.clock.now() + 10
        status = target(TASK, TaskEvent.CLAIMED)
        change = a_change(
            update(task, guard, status=status, claim=task.claim + 1, claim_until=until)
        )
        return await self._commit([change])

    async def settle(self, pick: int, other: int) -> object:
        """Settles two of the held claims in one call; one may be an outdated claim of the same
        task."""
        picked = [newest(self.claims, pick), newest(self.claims, other)]
        changes: list[Change] = []
        for number, task in enumerate(picked):
            if task is None:
                continue
            event = TaskEvent.SUCCEEDED if (pick + number) % 3 else TaskEvent.FAILED
            guard = Guard(sources(TASK, event), equals=(("claim", task.claim),))
            stats = a_stats(task.shard, task.run_id, job_id=job_of(task.run_id))
            counts = {"done": 1, target(TASK, event).value: 1, "credits": other}
            changes.append(
                SettleChange(
                    (
                        update(task, guard, status=target(TASK, event), credits=other),
                        add(stats, Guard(NOT_CLOSED), **counts),
                    )
                )
            )
        return await self._commit(changes)

    async def release_task(self, pick: int, other: int) -> object:
        task = newest(self.claims, pick)
        if task is None:
            return None
        guard = Guard(sources(TASK, TaskEvent.RELEASED), equals=(("claim", task.claim),))
        change = a_change(
            update(task, guard, status=target(TASK, TaskEvent.RELEASED), claim_until=0.0)
        )
        return await self._commit([change])

    async def change_counter_state(self, pick: int, other: int) -> object:
        job_id, run_id = some_run(pick)
        event = CounterEvent.DRAINING if other % 3 else CounterEvent.CLOSED
        stats = a_stats(other % SHARD_COUNT, run_id, job_id=job_id)
        guard = Guard(sources(COUNTERS, event))
        return await self._commit([a_change(update(stats, guard, status=target(COUNTERS, event)))])

    async def end_run(self, pick: int, other: int) -> object:
        job_id, run_id = some_run(pick)
        run = a_run(run_id, job_id=job_id)
        guard = Guard(sources(RUN, RunEvent.STOPPED))
        ended = update(
            run, guard, status=target(RUN, RunEvent.STOPPED), updated_at=self.clock.now()
        )
        notice = a_notice(pick % 3, job_id=job_id, run_id=run_id, due_at=self.clock.now() + other)
        return await self._commit([a_change(ended, insert(notice))])

    async def use_key(self, pick: int, other: int) -> object:
        now = self.clock.now()
        record = a_record(f"key-{pick % 2}", owner=f"owner-{other % 2}", expires_at=now + 5 * other)
        return await self._commit([a_change(insert(record, over_expired_at=now))])

    async def answer_key(self, pick: int, other: int) -> object:
        record = a_record(f"key-{pick % 2}")
        guard = Guard(equals=(("owner", f"owner-{other % 2}"), ("response_status", None)))
        return await self._commit(
            [a_change(update(record, guard, response_status=201, response_body="{}"))]
        )

    async def delete_rows(self, pick: int, other: int) -> object:
        task = newest(self.claims, pick)
        deletions = [a_change(delete(a_record(f"key-{other % 2}")))]
        if task is not None and other % 2:
            deletions.append(a_change(delete(task, Guard(equals=(("claim", task.claim),)))))
        return await self._commit(deletions)

    async def plan_deletion(self, pick: int, other: int) -> object:
        job_id, run_id = some_run(pick)
        intent = a_deletion_intent(
            pick, job_id=job_id, run_id=run_id, due_at=self.clock.now() + other
        )
        return await self._commit([a_change(insert(intent))])

    async def plan_schedule(self, pick: int, other: int) -> object:
        """Inserts a schedule, or moves one under a guard on its version."""
        fire_at = self.clock.now() + other if pick % 4 else None
        schedule = a_schedule(some_run(pick)[0], next_fire_at=fire_at, version=other % 2)
        guard = Guard(equals=(("version", other % 3),))
        moved = update(schedule, guard, next_fire_at=fire_at, version=other % 3 + 1)
        return await self._commit([a_change(moved if other % 2 else insert(schedule))])

    async def plan_export(self, pick: int, other: int) -> object:
        job_id, run_id = some_run(pick)
        due_at = self.clock.now() + other
        export = an_export(pick, job_id=job_id, run_id=run_id, due_at=due_at)
        expiring = update(a_run(run_id, job_id=job_id), sweep_at=due_at)
        return await self._commit([a_change(insert(export)), a_change(expiring)])

    async def sample(self, pick: int, other: int) -> object:
        """Takes a sample, which is stored together with the run's row or not at all."""
        job_id, run_id = some_run(pick)
        noted = update(a_run(run_id, job_id=job_id), sampled_at=self.clock.now(), sampled_done=pick)
        taken = insert(a_sample(other, run_id, job_id=job_id, at=self.clock.now()))
        return await self._commit([a_change(noted, taken)])

    async def delete_run_rows(self, pick: int, other: int) -> object:
        """Deletes in several calls until nothing is left. Which rows go first depends on the
        engine."""
        job_id, run_id = some_run(pick)
        total = 0
        while count := await self.engine.store.delete_run_rows(
            job_id, run_id if other % 2 else None, limit=other + 1
        ):
            total += count
        return total

    async def delete_expired(self, pick: int, other: int) -> object:
        return await self.engine.store.delete_expired(self.clock.now())

    async def read_row(self, pick: int, other: int) -> object:
        key = newest(list(self.keys), pick)
        return None if key is None else await self._read(key)

    async def find_rows(self, pick: int, other: int) -> object:
        after = newest(self.messages, other)
        run = some_run(pick)
        behind = after.ref.task_id if after else None
        questions = make_questions(*run, now=self.clock.now(), after=behind, limit=1 + other)
        return await questions[pick % len(questions)](self.engine.store)

    async def send(self, pick: int, other: int) -> object:
        refs = [message.ref for message in self._picked(pick, pick)[:1]]
        try:
            await self.engine.queue.send(refs)
        except QueueGone:
            return "gone"
        return refs

    async def receive(self, pick: int, other: int) -> object:
        _, run_id = some_run(pick)
        try:
            received = await self.engine.queue.receive(run_id, count_max=other, visibility_s=10)
        except QueueGone:
            return "gone"
        self.messages += received
        return [(message.ref, message.receives) for message in received]

    async def extend(self, pick: int, other: int) -> object:
        messages = self._picked(pick, other)
        lost = await self.engine.queue.extend(messages, visibility_s=10)
        return sorted(n for n, message in enumerate(self.messages) if message.receipt in lost)

    async def ack(self, pick: int, other: int) -> None:
        await self.engine.queue.ack(self._picked(pick, other))

    async def bounce(self, pick: int, other: int) -> None:
        await self.engine.queue.bounce(self._picked(pick, other), delay_s=other)

    async def open_run(self, pick: int, other: int) -> None:
        await self.engine.queue.open_run(some_run(pick)[1])

    async def close_run(self, pick: int, other: int) -> None:
        await self.engine.queue.close_run(some_run(pick)[1])

    async def acquire(self, pick: int, other: int) -> object:
        job_id, run_id = some_run(pick)
        taken = await self.engine.coordinator.acquire(
            job_id, run_id, count_max=other, cap=4, ttl_s=10
        )
        self.leases += taken
        return len(taken)

    async def acquire_hosts(self, pick: int, other: int) -> object:
        pool = HostPool(some_run(pick)[0], "example.com", cap=2, spacing_s=other % 3)
        taken = await self.engine.coordinator.acquire_hosts([pool, pool], ttl_s=10)
        self.leases += [lease for lease in taken if lease is not None]
        return [lease is not None for lease in taken]

    async def renew(self, pick: int, other: int) -> object:
        picked = [lease for n in (pick, other) if (lease := newest(self.leases, n)) is not None]
        lost = await self.engine.coordinator.renew(picked, ttl_s=10)
        return sorted(n for n, lease in enumerate(self.leases) if lease in lost)

    async def release(self, pick: int, other: int) -> None:
        lease = newest(self.leases, pick)
        await self.engine.coordinator.release([] if lease is None else [lease])

    async def put_body(self, pick: int, other: int) -> object:
        key = f"jobs/{pick % 2}/{other % 2}/body"
        self.blob_keys[key] = None
        parts = [b"x" * pick, b"y" * other]
        if pick % 3:
            return await self.engine.blobs.put(key, parts)
        return await self.engine.blobs.put_stream(key, stream(parts))

    async def delete_bodies(self, pick: int, other: int) -> object:
        prefix = f"jobs/{pick % 2}" if other % 2 else f"jobs/{pick % 2}/{other % 2}"
        return await self.engine.blobs.delete_prefix(prefix)

    async def wait(self, pick: int, other: int) -> None:
        self.clock.advance((0.5, 1, 5, 10)[pick % 4])

    async def dump(self) -> object:
        """Returns everything that can be read from the engine."""
        queue, coordinator = self.engine.queue, self.engine.coordinator
        return {
            "rows": [await self._read(key) for key in self.keys],
            "found": [
                await question(self.engine.store)
                for job_id, run_id in RUNS
                for question in make_questions(job_id, run_id, now=self.clock.now())
            ],
            "depths": [await queue.depth(run_id) for _, run_id in RUNS],
            "leases": [await coordinator.count(run_id) for _, run_id in RUNS],
            "bodies": [await self._body(key) for key in self.blob_keys],
        }

    async def _body(self, key: str) -> bytes | None:
        try:
            async with aclosing(self.engine.blobs.open(key)) as parts:
                return b"".join([part async for part in parts])
        except BlobMissing:
            return None

    async def _read(self, key: Any) -> object:
        return await self.engine.store.read(key)

    async def _commit(self, changes: Sequence[Change]) -> object:
        changes = [with_jobs(change) for change in changes]
        self.keys |= dict.fromkeys(write.key for change in changes for write in change.writes)
        return [self._collect(verdict) for verdict in await self.engine.store.commit(changes)]

    def _collect(self, verdict: Verdict) -> Verdict:
        """Keeps the batches and claims that a verdict contains, for later steps."""
        rows = verdict.rows if isinstance(verdict, Applied) else [getattr(verdict, "row", None)]
        for row in rows:
            if isinstance(row, Batch):
                self.batches.append(row)
            elif isinstance(row, Task) and row.status is TaskStatus.PROCESSING:
                self.claims.append(row)
        return verdict

    def _note(self, *rows: Row) -> None:
        self.keys |= dict.fromkeys(with_job(key_of(row)) for row in rows)

    def _picked(self, pick: int, other: int) -> list[Message]:
        picked = [newest(self.messages, pick), newest(self.messages, other)]
        return [message for message in picked if message is not None]


FREQUENT = ("admit", "ingest", "receive", "claim", "settle")
VERBS: dict[str, Callable[[Walker, int, int], Awaitable[object]]] = {
    name: verb
    for name, verb in vars(Walker).items()
    if iscoroutinefunction(verb) and not name.startswith("_") and name not in {"take", "dump"}
}
DESTRUCTIVE = ("delete_run_rows", "close_run", "delete_rows", "delete_bodies")
# Steps of ordinary work come often, and steps that delete rows or queues seldom.
WEIGHTED = [
    "do_nothing",
    *sorted(VERBS.keys() - set(DESTRUCTIVE)) * 2,
    *DESTRUCTIVE,
    *FREQUENT * 4,
    *("wait",) * 3,
]
