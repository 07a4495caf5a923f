"""Tasks: claim one, judge its outcome, hand one back (SPEC.md 4.4)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

import msgspec

from conveyor.domain import limits, problems
from conveyor.domain.changes import Change, Verdict
from conveyor.domain.damage import DamagedTask
from conveyor.domain.model import FailureReason, Job, Problem, Result, Task, TaskRef
from conveyor.domain.run import settlement
from conveyor.domain.run.settlement import Claim, Cost, Throttled
from conveyor.ports.errors import PartlyUnavailable, Unavailable
from conveyor.ports.gateway import NotScraped, Scraped, ScrapeRequest
from conveyor.usecases.context import Context
from conveyor.usecases.submit import staging


class Retry(msgspec.Struct, frozen=True):
    """The try failed; the same message comes back after `delay_s`."""

    change: Change
    delay_s: float


class Finish(msgspec.Struct, frozen=True):
    """The task is over, well or badly."""

    change: Change


async def claim(env: Context, refs: Sequence[TaskRef]) -> list[Claim]:
    """Takes tasks. After an unknown outcome our own claim is indistinguishable from another's,
    so it is left to lapse: that costs time, never the task, nor those claimed beside it. Where it
    is certain that nothing was written, there is nothing to wait for."""
    now = env.now()
    verdicts, turned_away = await _verdicts(env, [settlement.claim(ref, now=now) for ref in refs])
    again = {
        number: change
        for number, (ref, verdict) in enumerate(zip(refs, verdicts, strict=True))
        if (change := settlement.reclaim(ref, verdict, now=now)) is not None
    }
    if again:
        # Those that were taken stay taken, even if this is not answered.
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
    """None where nobody knows, and the numbers of those of which nothing was written; Unavailable
    when nothing at all is known."""
    try:
        return [*await env.store.commit(changes)], ()
    except PartlyUnavailable as partly:
        return [*partly.verdicts], partly.turned_away


def request_for(env: Context, job: Job, task: Task) -> ScrapeRequest:
    """What to send: job parameters under task parameters, secrets opened."""
    own = staging.unseal_secrets(env, job, "task", task.sealed)
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
        identity=f"{task.run_id}-{task.task_id}-{task.claim}",
        partition=job.caller,
        deadline_s=limits.SCRAPE_DEADLINE_S,
        body_bytes_max=limits.BODY_BYTES_MAX,
    )


async def store_body(env: Context, ref: TaskRef, task: Task, scraped: Scraped) -> Result:
    """The claim is part of the name: a worker that lost it cannot write over the winner's body."""
    prefix = f"jobs/{ref.job_id}/runs/{ref.run_id}"
    stored = await env.blobs.add(prefix, f"{task.task_id}.{task.claim}", (scraped.body,))
    return Result(
        stored.key, stored.size_bytes, stored.sha256, scraped.content_type, scraped.status
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


def judge_exhausted(env: Context, ref: TaskRef, task: Task, problem: Problem) -> Finish:
    """Counted out before it was tried again: it keeps losing its workers."""
    reason = settlement.LOST_WORKER_REASON
    change = settlement.fail(ref, task, reason, problem, spent=Cost(), now=env.now())
    return Finish(change)


def judge_unreadable(env: Context, ref: TaskRef, task: DamagedTask) -> Finish:
    """Its row is damaged: nobody knows for certain what was to be fetched."""
    return Finish(settlement.fail_unreadable(ref, task, now=env.now()))


def judge_crash(env: Context, job: Job, ref: TaskRef, task: Task, spent: Cost) -> Retry | Finish:
    """Our own code crashed over the task: an attempt that failed."""
    crashed = NotScraped(
        reason=FailureReason.OTHER,
        problem=problems.handler_crashed(),
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
    """Gives up a claim without an outcome; a claim that is lost already is fine."""
    change = settlement.release_claim(ref, task, spent=spent, problem=problem, now=env.now())
    try:
        await env.commit(change)
    except Unavailable:
        return  # The claim lapses by itself.
