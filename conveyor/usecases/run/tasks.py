"""Tasks: claim tasks, turn outcomes into changes, release claims (SPEC.md 4.4).

The `judge_*` functions write nothing: they return the change for the shard writer to commit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

import msgspec

from conveyor.domain import errors, limits
from conveyor.domain.changes import Change, TaskKey, Verdict
from conveyor.domain.damage import DamagedTask
from conveyor.domain.ids import shard_of
from conveyor.domain.lifecycle import TASK_TERMINAL
from conveyor.domain.model import FailureReason, Job, Problem, Result, Run, Task, TaskRef
from conveyor.domain.queries import TasksAt
from conveyor.domain.run import settlement
from conveyor.domain.run.settlement import Claim, Claimed, Cost, Throttled
from conveyor.ports.errors import PartlyUnavailable, Unavailable
from conveyor.ports.gateway import NotScraped, PageMemory, Scraped, ScrapeRequest
from conveyor.ports.queue import Message
from conveyor.usecases.context import Context
from conveyor.usecases.submit import staging


class Retry(msgspec.Struct, frozen=True):
    """The attempt failed and may be repeated; the same message returns after `delay_s`."""

    change: Change
    delay_s: float


class Finish(msgspec.Struct, frozen=True):
    """The task has ended, successfully or not."""

    change: Change


async def take(env: Context, messages: Sequence[Message]) -> list[Claim]:
    """Takes the tasks of received messages, one verdict each.

    A first delivery is held without a write. A redelivered message is claimed by a write: its
    earlier worker may still be working, and the new number ends that worker's right to settle.
    """
    first = {message.ref.task_id: message.ref for message in messages if message.receives == 1}
    rows = await env.store.find(TasksAt(refs=tuple(first.values()))) if first else []
    row_of = {row.task_id: row for row in rows}
    claims: dict[int, Claim] = {}
    for number, message in enumerate(messages):
        # Popped, because one batch may have two messages of a task. The second is claimed by a
        # write.
        if message.receives == 1 and first.pop(message.ref.task_id, None) is not None:
            row = row_of.get(message.ref.task_id)
            verdict = settlement.hold_first(row, nonce=_nonce(env), now=env.now())
            if verdict is not None:
                claims[number] = verdict
    others = [number for number in range(len(messages)) if number not in claims]
    if others:
        verdicts = await claim(env, [messages[number].ref for number in others])
        claims.update(zip(others, verdicts, strict=True))
    return [claims[number] for number in range(len(messages))]


def _nonce(env: Context) -> str:
    return f"{env.random.getrandbits(32):08x}"


async def claim(env: Context, refs: Sequence[TaskRef]) -> list[Claim]:
    """Claims tasks, one verdict each.

    After an unknown outcome, the own claim cannot be distinguished from the claim of another
    worker, so it is left to lapse. That costs time, but neither the task nor the tasks claimed in
    the same call. If the store guarantees that a change wrote nothing, the result is Throttled and
    need not be waited for.
    """
    now = env.now()
    verdicts, turned_away = await _verdicts(env, [settlement.claim(ref, now=now) for ref in refs])
    # A task that was tried before needs a second change, which also moves its shard's counters.
    # Most tasks are new, so the first change assumes a new task.
    again = {
        number: change
        for number, (ref, verdict) in enumerate(zip(refs, verdicts, strict=True))
        if (change := settlement.reclaim(ref, verdict, now=now)) is not None
    }
    if again:
        # The tasks that the first commit claimed stay claimed, even if the second commit fails.
        with suppress(Unavailable):
            second, _ = await _verdicts(env, list(again.values()))
            for number, verdict in zip(again, second, strict=True):
                verdicts[number] = verdict
    return [
        Throttled() if number in turned_away else settlement.claim_result(verdict, now=now)
        for number, verdict in enumerate(verdicts)
    ]


async def _verdicts(
    env: Context, changes: Sequence[Change]
) -> tuple[list[Verdict | None], Collection[int]]:
    """Commits the changes. A verdict is None if its outcome is unknown. The second value has the
    numbers of the changes that certainly wrote nothing. Raises Unavailable if no verdict is
    known."""
    try:
        return [*await env.store.commit(changes)], ()
    except PartlyUnavailable as partly:
        return [*partly.verdicts], partly.turned_away


def request_for(
    env: Context, job: Job, claimed: Claimed, memory: PageMemory | None = None
) -> ScrapeRequest:
    """Builds the request: task parameters override job parameters, and secrets are unsealed."""
    task = claimed.task
    own = staging.unseal_secrets(env, job, "task", task.sealed)
    # Headers of the line replace those of the job as a whole; parameters are merged.
    headers = own.headers
    if headers is None:
        headers = staging.unseal_secrets(env, job, "headers", job.headers_sealed).headers
    key = staging.unseal_secrets(env, job, "auth", job.auth_sealed).body
    return ScrapeRequest(
        url=task.url,
        method=task.method,
        params={**job.params, **(task.params or {})},
        headers=headers or {},
        body=own.body,
        body_content_type=own.content_type,
        auth=key.decode() if key else None,
        # With the claim, so that a repeated attempt is not taken for the same request.
        identity=f"{task.run_id}-{task.task_id}-{claimed.claim_id}",
        partition=job.caller,
        deadline_s=limits.SCRAPE_DEADLINE_S,
        body_bytes_max=limits.BODY_BYTES_MAX,
        memory=memory,
    )


async def store_body(env: Context, ref: TaskRef, claimed: Claimed, scraped: Scraped) -> Result:
    """Stores the body under a name with the claim, so that a worker that lost its claim cannot
    overwrite the body of the worker that has it."""
    prefix = f"jobs/{ref.job_id}/runs/{ref.run_id}"
    name = f"{ref.task_id}.{claimed.claim_id}"
    stored = await env.blobs.add(prefix, name, (scraped.body,))
    return Result(
        stored.key,
        stored.size_bytes,
        stored.sha256,
        scraped.content_type,
        scraped.status,
        scraped.final_url,
    )


def judge_success(
    env: Context, ref: TaskRef, task: Task, scraped: Scraped, result: Result
) -> Finish:
    spent = Cost(scraped.credits, scraped.cost_micros)
    return Finish(settlement.succeed(ref, task, result, spent=spent, now=env.now()))


def judge_failure(
    env: Context, job: Job, ref: TaskRef, task: Task, miss: NotScraped
) -> Retry | Finish:
    spent = Cost(miss.credits, miss.cost_micros)
    if miss.retryable:
        delay_s = settlement.may_retry(
            task,
            miss.reason,
            attempts_max=job.max_attempts,
            retry_after_s=miss.retry_after_s,
            random=env.random,
        )
        if delay_s is not None:
            change = settlement.release_for_retry(
                ref, task, miss.problem, spent=spent, now=env.now()
            )
            return Retry(change, delay_s)
    change = settlement.fail(ref, task, miss.reason, miss.problem, spent=spent, now=env.now())
    return Finish(change)


async def judge_duplicate(
    env: Context, run: Run, ref: TaskRef, duplicate: Task
) -> tuple[Task, Finish] | None:
    """Returns the duplicate and the outcome that it shares with its original. Returns None while
    the original has not ended."""
    assert duplicate.duplicate_of is not None
    shard = shard_of(duplicate.duplicate_of, run.shard_count)
    original = await env.store.read(TaskKey(ref.job_id, ref.run_id, duplicate.duplicate_of, shard))
    if original is None or original.status not in TASK_TERMINAL:
        return None
    duplicate = settlement.as_fetched_with(duplicate, original)
    return duplicate, Finish(settlement.share(ref, duplicate, original, now=env.now()))


def judge_exhausted(env: Context, ref: TaskRef, task: Task, problem: Problem) -> Finish:
    """Fails a task that has lost too many workers, before it is fetched again."""
    reason = settlement.LOST_WORKER_REASON
    change = settlement.fail(ref, task, reason, problem, spent=Cost(), now=env.now())
    return Finish(change)


def judge_unreadable(env: Context, ref: TaskRef, task: DamagedTask) -> Finish:
    """Fails a task whose row is damaged: the URL to fetch is not known for certain."""
    return Finish(settlement.fail_unreadable(ref, task, now=env.now()))


def judge_crash(env: Context, job: Job, ref: TaskRef, task: Task, spent: Cost) -> Retry | Finish:
    """Turns a crash of Conveyor's own code into a failed attempt."""
    crashed = NotScraped(
        reason=FailureReason.OTHER,
        problem=errors.handler_crashed(),
        retryable=True,
        credits=spent.credits,
        cost_micros=spent.cost_micros,
    )
    return judge_failure(env, job, ref, task, crashed)


async def release_claim(
    env: Context,
    ref: TaskRef,
    task: Task,
    *,
    spent: Cost | None = None,
    problem: Problem | None = None,
) -> None:
    """Gives up a claim without an outcome. If the claim is already lost, the guarded change has no
    effect. If nothing was written for it, there is nothing to change, except a cost to count."""
    is_free = spent is None or spent == Cost()
    if is_free and not settlement.is_written(task, now=env.now()):
        return
    change = settlement.release_claim(ref, task, spent=spent, problem=problem, now=env.now())
    try:
        await env.commit(change)
    except Unavailable:
        return  # The claim lapses.
