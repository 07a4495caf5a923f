"""TaskRunner: fetches, stores and settles one claimed task (SPEC.md 4.4, 4.11).

Owns:    one message, one lease and one claim for the duration of one call of `run`, and the
         outcome of the fetch until the store has accepted it.
Hears:   nothing: the poller passes all input as the argument of `run`.
Says:    Hold and Release to the heartbeater, Settle to the writer of the task's shard.
Crashes: never because of a task: a crash while a task is handled is a failed attempt of that task.

A fetched page has been paid for. After the fetch, the runner therefore retries the writes for as
long as the claim is valid, instead of releasing the claim and fetching again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import assert_never

import msgspec
import trio

from actors.limiters.storage_breaker import StorageBreaker
from actors.messages import (
    HeartbeaterMessage,
    Hold,
    Release,
    Settle,
    ShardWriterMessage,
    TaskAssignment,
)
from actors.runtime import Address, AskTimedOut, MailboxFull, Reply, bounded_cleanup
from actors.status_reporter import WaitStatus
from conveyor.domain import errors
from conveyor.domain.damage import DamagedTask
from conveyor.domain.model import Problem, RunFailure, Task
from conveyor.domain.run import settlement
from conveyor.domain.run.settlement import (
    AlreadyDone,
    Claimed,
    Cost,
    HeldByOther,
    LostClaim,
    NoSuchTask,
    NotSettled,
    OutcomeUnknown,
    Settled,
    SettleVerdict,
    Throttled,
    Unreadable,
)
from conveyor.domain.run.wait_reason import GATEWAY_REASONS, WaitReason
from conveyor.domain.submit.target import host_of
from conveyor.domain.timing import bounce_delay_s, duplicate_delay_s
from conveyor.ports.errors import Unavailable, is_resource_shortage
from conveyor.ports.gateway import (
    Deferred,
    Gateway,
    NotScraped,
    Outcome,
    PageMemory,
    Scraped,
)
from conveyor.ports.tracer import SpanKind, SpanRecord
from conveyor.telemetry import Metrics
from conveyor.usecases.context import Context
from conveyor.usecases.crash_isolation import Crash, is_outage, isolate
from conveyor.usecases.run import runs, tasks
from conveyor.usecases.run.tasks import Finish, Retry
from conveyor.usecases.tracing import is_traced_fetch

log = logging.getLogger(__name__)

# How long a cancelled runner still waits for the verdict on a settle that the shard writer already
# has. A longer wait risks that the poller exceeds POLLER_GRACE_S (5 s) and counts as overdue. A
# shorter wait releases claims whose settle is about to be applied.
SETTLE_S = 2.5
# How long an interrupted runner may take to release its claim and bounce its message. After that
# the claim lapses and the message returns by its visibility timeout.
CLEANUP_S = 3.0
# How long `_put_back` waits for the heartbeater's answer. Bouncing without the answer is safe but
# may be undone by a heartbeat in progress, which delays the task by VISIBILITY_S.
RELEASE_S = 2.0
# Delay between two writes of one held page while the circuit is closed, that is, while other pages
# can be written. It doubles from the first value up to the second.
REWRITE_S, REWRITE_S_MAX = 0.5, 10.0
# The storage must refuse the page this many times in a row, and accept another body of the same
# size each time, before the page counts as unstorable. A smaller number turns a short outage into a
# failed attempt.
REFUSALS_MAX = 5

_NO_ROOM = "The storage was away, and the worker had no room to hold the page."
_CUT_OFF = "The work on the task was cut off before its page was stored."
_SHORT = "this worker is out of descriptors, memory, threads or ports"


class PageUnstorable(Exception):
    """The storage accepts other bodies but refuses this page."""


class WriterCrashed(Exception):
    """The shard writer crashed while it handled this settle; the writer has logged the error."""


@dataclass(slots=True, eq=False)
class _Attempt:
    """One attempt at a task: the claim, the outcome of the gateway call, and the change that
    records it. `crash` is the exception that ended the attempt, if Conveyor's own code raised it.
    """

    work: TaskAssignment
    outcome: Outcome | None = None
    verdict: Finish | Retry | None = None
    crash: Exception | None = None
    memory: PageMemory = field(default_factory=PageMemory)

    @property
    def claimed(self) -> Claimed:
        assert isinstance(self.work.claim, Claimed)
        return self.work.claim

    @property
    def task(self) -> Task:
        return self.claimed.task

    @property
    def spent(self) -> Cost:
        if self.outcome is None:
            return Cost()
        return Cost(self.outcome.credits, self.outcome.cost_micros)

    @property
    def page_bytes(self) -> int:
        return len(self.outcome.body) if isinstance(self.outcome, Scraped) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRunner:
    env: Context
    gateway: Gateway
    heartbeater: Address[HeartbeaterMessage]
    writers: Sequence[Address[ShardWriterMessage]]
    metrics: Metrics
    storage: StorageBreaker
    wait_status: WaitStatus = field(default_factory=WaitStatus)

    async def run(self, work: TaskAssignment) -> float | None:
        """Handles one message. Returns the seconds until the message is visible again, or None if
        it does not return or the time is unknown."""
        attempt = _Attempt(work)
        task_id = work.message.ref.task_id
        try:
            # `_end_crashed` runs only if `_dispatch` crashed. If both crash, the claim is left to
            # lapse.
            for handle in (self._dispatch, self._end_crashed):
                done = await isolate(
                    partial(handle, attempt),
                    "a task",
                    extra={"task": task_id},
                    logged=(WriterCrashed,),
                )
                if not isinstance(done, Crash):
                    return done
                attempt.crash = done.error
        except Unavailable as error:
            # Nothing is settled. The message returns after its visibility timeout and the claim
            # lapses.
            log.warning(
                "task deferred: engine unavailable", extra={"task": task_id, "cause": str(error)}
            )
        finally:
            attempt.memory.release()
        # A lapsed claim counts as a lost worker. LOST_WORKERS_MAX bounds how often a task can end
        # here.
        return None

    async def _dispatch(self, attempt: _Attempt) -> float | None:
        work, ref = attempt.work, attempt.work.message.ref
        match work.claim:
            case Claimed():
                return await self._attempt(attempt)
            case AlreadyDone():
                # The previous worker may have crashed between the settle and the completion check.
                # Check before the ack: without the message, only the sweeper would repeat the
                # check.
                await runs.complete_if_done(self.env, ref.job_id, ref.run_id)
                await self.env.queue.ack((work.message,))
                return None
            case HeldByOther(until):
                self.metrics.messages_bounced.inc()
                # One second more than the claim lasts, so that the next receive finds it lapsed.
                return await self._bounce(work, max(until - self.env.now(), 0.0) + 1.0)
            case NoSuchTask() | Throttled():
                # The row was deleted, is not visible yet, or the store throttled the claim. The
                # runner cannot distinguish the first two, so it does not ack: the queue is removed
                # when the run ends.
                self.metrics.messages_bounced.inc()
                return await self._bounce(work, bounce_delay_s(work.message.receives))
            case Unreadable(task):
                return await self._end_unreadable(work, task)
            case _:
                assert_never(work.claim)

    async def _end_unreadable(self, work: TaskAssignment, task: DamagedTask) -> float | None:
        """Fails a task whose row cannot be decoded, without fetching it. If another process has
        changed the row meanwhile, the message is bounced and the next worker reads the row again.
        """
        verdict = tasks.judge_unreadable(self.env, work.message.ref, task)
        settled = await self._settle(work, task, verdict)
        if isinstance(settled, LostClaim):
            return await self._bounce(work, bounce_delay_s(work.message.receives))
        if isinstance(settled, Settled):
            extra = {"task": task.task_id, "run": task.run_id, "fields": task.damaged}
            log.error("the stored row of a task is damaged: it failed unfetched", extra=extra)
        return None

    async def _attempt(self, attempt: _Attempt) -> float | None:
        """Works on a claimed task. If the work is interrupted before an outcome, releases the
        claim. After a crash the claim is kept, because `_end_crashed` settles the attempt as
        failed."""
        try:
            problem = settlement.lost_workers_problem(attempt.task)
            if problem is None:
                return await self._scrape(attempt)
            ref = attempt.work.message.ref
            attempt.verdict = tasks.judge_exhausted(self.env, ref, attempt.task, problem)
            return await self._conclude(attempt)
        # BaseException, because trio.Cancelled is the usual interruption. A plain Exception that is
        # not an outage is a crash and goes to `_end_crashed`.
        except BaseException as error:
            if is_outage(error) or not isinstance(error, Exception):
                with bounded_cleanup(CLEANUP_S):
                    await self._give_up(attempt, _CUT_OFF)
            raise

    async def _end_crashed(self, attempt: _Attempt) -> float | None:
        """Ends the handling of a message after a crash: bounces it, releases the claim, or settles
        a failed attempt."""
        work, ref = attempt.work, attempt.work.message.ref
        assert attempt.crash is not None
        if not isinstance(work.claim, Claimed):
            return await self._bounce(work, bounce_delay_s(work.message.receives))
        # A process without descriptors, memory, threads or ports would fail every task that it
        # receives. The task is not at fault, so no attempt is counted.
        if is_resource_shortage(attempt.crash):
            work.defer(WaitReason.RESOURCES, _SHORT, None)
            return await self._give_up(attempt, _SHORT)
        attempt.verdict = tasks.judge_crash(self.env, work.job, ref, attempt.task, attempt.spent)
        return await self._conclude(attempt)

    async def _scrape(self, attempt: _Attempt) -> float | None:
        """Fetches and writes under the heartbeat. During the write, the heartbeater renews only the
        message and the claim; slot and lease have passed to the next task, and the host has room
        for another."""
        work = attempt.work
        # The heartbeater cancels this scope when the lease, the message or the claim is lost. Only
        # then does control reach the lines below the block.
        with trio.CancelScope() as scope:
            hold = partial(Hold, message=work.message, task=attempt.task, scope=scope)
            # Without a checkpoint: this saves one task switch per task on the hottest path.
            await self.heartbeater.tell_without_checkpoint(
                hold(work.permit.lease_id, host_lease_id=work.permit.host_lease_id)
            )
            try:
                if attempt.task.duplicate_of is not None:
                    return await self._share(attempt)
                attempt.outcome = await self._fetch(attempt)
                is_passed_on = work.permit.release_early()
                if is_passed_on or work.permit.host_lease_id is not None:
                    # Before any of the leases is released: a heartbeat that misses a lease cancels
                    # the work that holds it.
                    lease_id = None if is_passed_on else work.permit.lease_id
                    await self.heartbeater.tell_without_checkpoint(hold(lease_id))
                await work.permit.release_host()
                return await self._apply_outcome(attempt)
            finally:
                # On every exit, so that the heartbeater stops renewing a message that this runner
                # no longer handles.
                self._end_hold(work)
        log.warning(
            "lease, message or claim lost: task cancelled",
            extra={"task": attempt.task.task_id, "claim": attempt.task.claim},
        )
        return await self._give_up(attempt, _CUT_OFF)

    async def _share(self, attempt: _Attempt) -> float | None:
        """Ends a duplicate with the outcome of its original, without a fetch. While the original
        has not ended, the duplicate is released and its message bounced."""
        work, ref = attempt.work, attempt.work.message.ref
        shared = await tasks.judge_duplicate(self.env, work.run, ref, attempt.task)
        if shared is None:
            await tasks.release_claim(self.env, ref, attempt.task)
            return await self._put_back(work, duplicate_delay_s(work.message.receives))
        task, verdict = shared
        claim = msgspec.structs.replace(attempt.claimed, task=task)
        return await self._conclude(_Attempt(replace(work, claim=claim), verdict=verdict))

    async def _fetch(self, attempt: _Attempt) -> Outcome:
        work = attempt.work
        # Check before the call is charged: a page that cannot be stored would be paid for in vain.
        if not self.storage.may_fetch(self.env.blobs):
            return Deferred(reason=WaitReason.STORAGE, detail=self.storage.detail)
        request = tasks.request_for(self.env, work.job, attempt.claimed, attempt.memory)
        work.permit.start_call()
        started_at = trio.current_time()
        ref = work.message.ref
        self.wait_status.begin_fetch(ref.run_id, ref.task_id, at=self.env.now())
        try:
            outcome = await self.gateway.scrape(request)
        except Exception:
            # A crash while an answer is read. If it counted as an interrupted call, a few such
            # pages would occupy a small plan, which other callers may share, for minutes.
            work.permit.end_crashed_call()
            raise
        finally:
            self.wait_status.end_fetch(ref.run_id, ref.task_id)
        duration_s = trio.current_time() - started_at
        self._count_fetch(outcome, duration_s)
        if self.env.tracer is not None and is_traced_fetch(attempt.task.index):
            self.env.tracer.record(self._fetch_span(attempt, outcome, duration_s))
        return work.permit.finish_call(outcome, request.url)

    def _fetch_span(self, attempt: _Attempt, outcome: Outcome, duration_s: float) -> SpanRecord:
        now, task = self.env.now(), attempt.task
        status = outcome.status if isinstance(outcome, Scraped) else 0
        return SpanRecord(
            name="fetch",
            kind=SpanKind.CLIENT,
            started_at=now - duration_s,
            ended_at=now,
            attributes={
                "conveyor.task_id": task.task_id,
                "conveyor.attempt": task.attempts + 1,
                "server.address": host_of(task.url) or "",
                "http.response.status_code": status,
            },
            is_error=not isinstance(outcome, Scraped),
            run_id=task.run_id,
        )

    def _count_fetch(self, outcome: Outcome, duration_s: float) -> None:
        body_bytes = 0
        match outcome:
            case Scraped():
                status_class = f"{outcome.status // 100}xx"
                body_bytes = len(outcome.body)
            case NotScraped():
                status_class = f"{outcome.problem.status // 100}xx"
            case Deferred():
                status_class = "deferred"
            case _:
                assert_never(outcome)
        self.metrics.fetches.count(status_class, duration_s=duration_s, body_bytes=body_bytes)

    async def _apply_outcome(self, attempt: _Attempt) -> float | None:
        work, ref, outcome = attempt.work, attempt.work.message.ref, attempt.outcome
        match outcome:
            case Scraped():
                return await self._conclude(attempt)
            case NotScraped(run_failure=RunFailure() as cause):
                detail = outcome.problem.detail or outcome.problem.title
                # Release and bounce before the run fails: after `runs.fail`, discovery stops this
                # poller and cancels the runner.
                await self._release_claim(attempt, outcome.problem)
                await self._put_back(work, bounce_delay_s(work.message.receives))
                await runs.fail(self.env, work.run, cause, detail)
                return None
            case Deferred():
                # For a remote gateway, the call limiter already holds the run back by its window
                # and circuit.
                if work.permit.call is None or outcome.reason not in GATEWAY_REASONS:
                    work.defer(outcome.reason, outcome.detail, outcome.retry_after_s)
                await self._release_claim(attempt, errors.call_deferred(outcome.detail))
                delay_s = outcome.retry_after_s
                if delay_s is None:
                    delay_s = bounce_delay_s(work.message.receives)
                return await self._put_back(work, delay_s)
            case NotScraped():
                self.wait_status.set_last_failure(ref.run_id, outcome.reason)
                attempt.verdict = tasks.judge_failure(
                    self.env, work.job, ref, attempt.task, outcome
                )
                return await self._conclude(attempt)
            case None:
                raise AssertionError("nothing was fetched")
            case _:
                assert_never(outcome)

    async def _conclude(self, attempt: _Attempt) -> float | None:
        """Writes the outcome of the attempt, however long the storage is unavailable. The call has
        been made, and repeating it would cost the same again."""
        settled = await self._write_once(attempt)
        if settled is None and not self.storage.hold(attempt.page_bytes):
            # The page is discarded, but its cost is recorded: that write is small and needs no held
            # bytes.
            return await self._give_up(attempt, _NO_ROOM)
        if settled is None:
            # Remember the size now: `_write` drops the body from memory once it is durable.
            held_bytes = attempt.page_bytes
            try:
                settled = await self._write_later(attempt)
            finally:
                self.storage.release(held_bytes)
        verdict = attempt.verdict
        if isinstance(verdict, Retry) and isinstance(settled, Settled):
            return await self._put_back(attempt.work, verdict.delay_s)
        return None

    async def _write_once(
        self, attempt: _Attempt, probe: int | None = None
    ) -> SettleVerdict | None:
        """Stores the page and settles the task. Returns None if the storage is unavailable."""
        try:
            settled = await self._write(attempt)
        except Unavailable as error:
            self.storage.note_failure(error, probe)
            log.warning(
                "page not written", extra={"task": attempt.task.task_id, "cause": str(error)}
            )
            return None
        except (OSError, MemoryError, RuntimeError) as error:
            if not is_resource_shortage(error):
                raise
            self.storage.note_failure(error, probe)
            return None
        else:
            self.storage.note_success(probe)
            return settled
        finally:
            self.storage.abandon_probe(probe)  # No effect if the probe has reported.

    async def _write_later(self, attempt: _Attempt) -> SettleVerdict:
        """Retries until the outcome is written. While the circuit is open, the held pages of this
        process are written one at a time, as probes. Otherwise the delay grows separately for each
        page."""
        delay_s, refusals = REWRITE_S, 0
        while refusals < REFUSALS_MAX:
            probe = await self.storage.wait_turn()
            if probe is None:
                # Jitter: pages that failed together must not be retried together.
                await trio.sleep(delay_s * self.env.random.uniform(0.5, 1.0))
                delay_s = min(2 * delay_s, REWRITE_S_MAX)
            settled = await self._write_once(attempt, probe)
            if settled is not None:
                return settled
            # Any other answer resets the count: while the storage refuses all bodies, this page is
            # not special.
            refusals = refusals + 1 if await self._can_store_others(attempt) else 0
        raise PageUnstorable(attempt.task.task_id)

    async def _can_store_others(self, attempt: _Attempt) -> bool:
        """Returns whether the storage accepts another body of the same size. If it does, this page
        may be the only one that it refuses, and must not stop the fetches of all other tasks. Full
        storage accepts none."""
        size_bytes = attempt.page_bytes
        if not size_bytes:  # The body is durable; only the settle is missing.
            return False
        return await self.storage.test(self.env.blobs, self.env.process_id, size_bytes)

    async def _write(self, attempt: _Attempt) -> SettleVerdict:
        """Tries once to store and settle. A body that is already durable is not written again."""
        ref, task = attempt.work.message.ref, attempt.task
        if attempt.verdict is None:
            assert isinstance(attempt.outcome, Scraped)
            # The body must be durable before the settle that refers to it. Afterwards the copy in
            # memory is dropped, so that waiting settles do not hold pages.
            result = await tasks.store_body(self.env, ref, attempt.claimed, attempt.outcome)
            attempt.verdict = tasks.judge_success(self.env, ref, task, attempt.outcome, result)
            attempt.outcome = msgspec.structs.replace(attempt.outcome, body=b"")
            attempt.memory.release()
        return await self._settle(attempt.work, task, attempt.verdict)

    async def _settle(
        self, work: TaskAssignment, task: Task, verdict: Finish | Retry
    ) -> SettleVerdict:
        """Sends the settle to the shard writer and waits for its verdict. The writer answers every
        settle, including one that crashes it."""
        # The writer acks the message that it is given. A retry keeps the message, which is bounced
        # later.
        message = work.message if isinstance(verdict, Finish) else None
        ref = work.message.ref
        reply: Reply[SettleVerdict] = Reply()
        # All settles of a shard go to one writer, because they change the same counters.
        writer = self.writers[ref.shard % len(self.writers)]
        is_last, shard_count = work.permit.pool.is_finishing, work.run.shard_count
        settle = Settle(ref, task, verdict.change, message, reply, is_last, shard_count)
        await writer.tell_without_checkpoint(settle)
        await self._wait_settled(reply)
        settled = reply.result()
        if isinstance(settled, OutcomeUnknown):
            raise Unavailable("the writer gave no verdict")
        if isinstance(settled, NotSettled):
            raise WriterCrashed(task.task_id)
        return settled

    async def _wait_settled(self, reply: Reply[SettleVerdict]) -> None:
        """Waits for the verdict. A cancelled runner waits SETTLE_S longer: its page is stored, and
        the group that contains its settle may be in progress."""
        try:
            await reply.wait_answered()
        except trio.Cancelled:
            with bounded_cleanup(SETTLE_S, what="settle"):
                await reply.wait_answered()
            raise

    async def _give_up(self, attempt: _Attempt, why: str) -> float:
        """Releases a claim without an outcome. If another worker owns the claim by now, nothing
        changes. The cost of a call that was made is counted, although its page is lost."""
        await self._release_claim(attempt, errors.page_discarded(why))
        return await self._put_back(attempt.work, 0.0)

    async def _release_claim(self, attempt: _Attempt, problem: Problem) -> None:
        ref, spent = attempt.work.message.ref, attempt.spent
        await tasks.release_claim(self.env, ref, attempt.task, spent=spent, problem=problem)

    async def _put_back(self, work: TaskAssignment, delay_s: float) -> float:
        """Bounces a held message after the heartbeater has confirmed that no heartbeat can hide it
        again."""

        def release(reply: Reply[None]) -> Release:
            return Release(work.message.receipt, reply)

        with suppress(AskTimedOut):
            await self.heartbeater.ask(release, deadline_s=RELEASE_S)
        return await self._bounce(work, delay_s)

    async def _bounce(self, work: TaskAssignment, delay_s: float) -> float:
        await self.env.queue.bounce((work.message,), delay_s=delay_s)
        return delay_s

    def _end_hold(self, work: TaskAssignment) -> None:
        # If the mailbox is full, the next heartbeat finds that the claim has ended and drops the
        # hold.
        with suppress(MailboxFull):
            self.heartbeater.tell_nowait(Release(work.message.receipt))
