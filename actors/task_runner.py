"""TaskRunner: scrapes, stores and settles one claimed task (SPEC.md 4.4, 4.11).

Owns:    one message, one lease and one claim, for as long as one call of `run` takes, and the
         outcome of the fetch until it is written.
Hears:   nothing: it is told everything when it is started.
Says:    Hold and Release to the heartbeater, Settle to the writer of its shard.
Crashes: never on account of a task: a crash over one is an attempt of it that failed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
from actors.wait_status import WaitStatus
from conveyor.domain import problems
from conveyor.domain.backpressure.permits import bounce_delay_s
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
from conveyor.ports.errors import Unavailable, is_resource_shortage
from conveyor.ports.gateway import Deferred, Gateway, NotScraped, Outcome, Scraped
from conveyor.telemetry import Metrics
from conveyor.usecases.context import Context
from conveyor.usecases.crash_isolation import Crash, is_outage, isolate
from conveyor.usecases.run import runs, tasks
from conveyor.usecases.run.tasks import Finish, Retry

log = logging.getLogger(__name__)

SETTLE_S = 2.5
CLEANUP_S = 3.0
RELEASE_S = 2.0
# Between the writes of one held page while the circuit is closed: the failure was its own.
REWRITE_S, REWRITE_S_MAX = 0.5, 10.0
# So many times in a row the storage took another body after it had refused the page.
REFUSALS_MAX = 5

_NO_ROOM = "The storage was away, and the worker had no room to hold the page."
_CUT_OFF = "The work on the task was cut off before its page was stored."
_SHORT = "this worker is out of descriptors, memory, threads or ports"


class PageUnstorable(Exception):
    """The storage works and does not take this page."""


class WriterCrashed(Exception):
    """The shard writer crashed over this settle; its log says why."""


@dataclass(slots=True, eq=False)
class _Attempt:
    """One try at a task: the claim, the outcome of its call once there is one, and the change that
    records it. `crash` is the error that the try ended with, if it was our own."""

    work: TaskAssignment
    outcome: Outcome | None = None
    verdict: Finish | Retry | None = None
    crash: Exception | None = None

    @property
    def task(self) -> Task:
        assert isinstance(self.work.claim, Claimed)
        return self.work.claim.task

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
        """Sees one message through; answers in how many seconds it will be back, if it will."""
        attempt = _Attempt(work)
        task_id = work.message.ref.task_id
        try:
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
            # Nothing is settled: the message returns by itself, the claim lapses.
            log.warning(
                "task deferred: engine unavailable", extra={"task": task_id, "cause": str(error)}
            )
        # A claim that lapses counts as a lost worker, and a task may lose only so many.
        return None

    async def _dispatch(self, attempt: _Attempt) -> float | None:
        work, ref = attempt.work, attempt.work.message.ref
        match work.claim:
            case Claimed():
                return await self._attempt(attempt)
            case AlreadyDone():
                await runs.complete_if_done(self.env, ref.job_id, ref.run_id)
                await self.env.queue.ack((work.message,))
                return None
            case HeldByOther(until):
                self.metrics.messages_bounced.inc()
                return await self._bounce(work, max(until - self.env.now(), 0.0) + 1.0)
            case NoSuchTask() | Throttled():
                # Deleted, not visible yet, or not now: the run's own end removes the message.
                self.metrics.messages_bounced.inc()
                return await self._bounce(work, bounce_delay_s(work.message.receives))
            case Unreadable(task):
                return await self._end_unreadable(work, task)
            case _:
                assert_never(work.claim)

    async def _end_unreadable(self, work: TaskAssignment, task: DamagedTask) -> float | None:
        """Fails a task whose row is damaged, unfetched. Where somebody has changed the row since,
        its message comes back, and it is judged anew."""
        verdict = tasks.judge_unreadable(self.env, work.message.ref, task)
        settled = await self._settle(work, task, verdict)
        if isinstance(settled, LostClaim):
            return await self._bounce(work, bounce_delay_s(work.message.receives))
        if isinstance(settled, Settled):
            extra = {"task": task.task_id, "run": task.run_id, "fields": task.damaged}
            log.error("the stored row of a task is damaged: it failed unfetched", extra=extra)
        return None

    async def _attempt(self, attempt: _Attempt) -> float | None:
        """Works under a claim, and gives it back if the work is cut off before an outcome. Not
        after a crash: then the attempt is settled as failed."""
        try:
            problem = settlement.lost_workers_problem(attempt.task)
            if problem is None:
                return await self._scrape(attempt)
            ref = attempt.work.message.ref
            attempt.verdict = tasks.judge_exhausted(self.env, ref, attempt.task, problem)
            return await self._conclude(attempt)
        except BaseException as error:
            if is_outage(error) or not isinstance(error, Exception):
                with bounded_cleanup(CLEANUP_S):
                    await self._give_up(attempt, _CUT_OFF)
            raise

    async def _end_crashed(self, attempt: _Attempt) -> float | None:
        """What becomes of a message whose handling crashed."""
        work, ref = attempt.work, attempt.work.message.ref
        assert attempt.crash is not None
        if not isinstance(work.claim, Claimed):
            return await self._bounce(work, bounce_delay_s(work.message.receives))
        if is_resource_shortage(attempt.crash):
            work.defer(WaitReason.RESOURCES, _SHORT, None)
            return await self._give_up(attempt, _SHORT)
        attempt.verdict = tasks.judge_crash(self.env, work.job, ref, attempt.task, attempt.spent)
        return await self._conclude(attempt)

    async def _scrape(self, attempt: _Attempt) -> float | None:
        """Fetches and writes under the heartbeat. While it is written, message and claim are kept
        alive; slot and lease have gone to the next task."""
        work, claim = attempt.work, attempt.task.claim
        with trio.CancelScope() as scope:
            hold = partial(Hold, message=work.message, claim=claim, work=scope)
            await self.heartbeater.tell_without_checkpoint(
                hold(work.lease_id, host_lease_id=work.host_lease_id)
            )
            try:
                attempt.outcome = await self._fetch(attempt)
                if work.release_early():
                    await self.heartbeater.tell_without_checkpoint(
                        hold(None, host_lease_id=work.host_lease_id)
                    )
                return await self._apply_outcome(attempt)
            finally:
                self._release_early(work)
        log.warning(
            "lease, message or claim lost: task cancelled",
            extra={"task": attempt.task.task_id, "claim": claim},
        )
        return await self._give_up(attempt, _CUT_OFF)

    async def _fetch(self, attempt: _Attempt) -> Outcome:
        work = attempt.work
        if not self.storage.may_fetch(self.env.blobs):
            return Deferred(reason=WaitReason.STORAGE, detail=self.storage.detail)
        request = tasks.request_for(self.env, work.job, attempt.task)
        if work.reservation is not None:
            work.reservation.start()
        if work.permit is not None:
            work.permit.start()
        outcome = await self.gateway.scrape(request)
        if work.permit is not None:
            outcome = work.permit.finish(outcome, request.url)
        if work.reservation is not None:
            work.reservation.finish(outcome)
        return outcome

    async def _apply_outcome(self, attempt: _Attempt) -> float | None:
        work, ref, outcome = attempt.work, attempt.work.message.ref, attempt.outcome
        match outcome:
            case Scraped():
                return await self._conclude(attempt)
            case NotScraped(run_failure=RunFailure() as cause):
                detail = outcome.problem.detail or outcome.problem.title
                await self._release_claim(attempt, outcome.problem)
                await self._put_back(work, bounce_delay_s(work.message.receives))
                await runs.fail(self.env, work.run, cause, detail)
                return None
            case Deferred():
                if work.permit is None or outcome.reason not in GATEWAY_REASONS:
                    work.defer(outcome.reason, outcome.detail, outcome.retry_after_s)
                await self._release_claim(attempt, problems.call_deferred(outcome.detail))
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
        """Writes the outcome of the attempt, however long the storage is away: the call has been
        made, and to make it again would cost as much again."""
        settled = await self._write_once(attempt)
        if settled is None and not self.storage.hold(attempt.page_bytes):
            # The spending is recorded, which takes no room worth counting.
            return await self._give_up(attempt, _NO_ROOM)
        if settled is None:
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
        """Stores the page and settles the task; None when the storage is away."""
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
            self.storage.abandon_probe(probe)  # Nothing, if it has reported.

    async def _write_later(self, attempt: _Attempt) -> SettleVerdict:
        """Tries again until it is written: in turn with all that this process holds while the
        circuit is open, else after a growing delay of its own."""
        delay_s, refusals = REWRITE_S, 0
        while refusals < REFUSALS_MAX:
            probe = await self.storage.wait_turn()
            if probe is None:
                await trio.sleep(delay_s * self.env.random.uniform(0.5, 1.0))
                delay_s = min(2 * delay_s, REWRITE_S_MAX)
            settled = await self._write_once(attempt, probe)
            if settled is not None:
                return settled
            refusals = refusals + 1 if await self._can_store_others(attempt) else 0
        raise PageUnstorable(attempt.task.task_id)

    async def _can_store_others(self, attempt: _Attempt) -> bool:
        """Whether the storage takes another body of the same size: then this page may be the only
        one that it refuses, and must not stop all others. A storage that is full takes none."""
        size_bytes = attempt.page_bytes
        if not size_bytes:  # Only its settle is missing.
            return False
        return await self.storage.test(self.env.blobs, self.env.process_id, size_bytes)

    async def _write(self, attempt: _Attempt) -> SettleVerdict:
        """One try to store and settle. What is durable already is not written again."""
        ref, task = attempt.work.message.ref, attempt.task
        if attempt.verdict is None:
            assert isinstance(attempt.outcome, Scraped)
            # The body is durable before anything is settled; then it need not be kept.
            result = await tasks.store_body(self.env, ref, task, attempt.outcome)
            attempt.verdict = tasks.judge_success(self.env, ref, task, attempt.outcome, result)
            attempt.outcome = msgspec.structs.replace(attempt.outcome, body=b"")
        return await self._settle(attempt.work, task, attempt.verdict)

    async def _settle(
        self, work: TaskAssignment, task: Task, verdict: Finish | Retry
    ) -> SettleVerdict:
        """Has it written. The writer answers every settle, even one that it crashes over."""
        message = work.message if isinstance(verdict, Finish) else None
        ref = work.message.ref
        reply: Reply[SettleVerdict] = Reply()
        writer = self.writers[ref.shard % len(self.writers)]
        await writer.tell_without_checkpoint(Settle(ref, task, verdict.change, message, reply))
        await self._wait_settled(reply)
        settled = reply.result()
        if isinstance(settled, OutcomeUnknown):
            raise Unavailable("the writer gave no verdict")
        if isinstance(settled, NotSettled):
            raise WriterCrashed(task.task_id)
        return settled

    async def _wait_settled(self, reply: Reply[SettleVerdict]) -> None:
        """Whoever is cut off here has its page already: a group under way is given its time."""
        try:
            await reply.wait_answered()
        except trio.Cancelled:
            with bounded_cleanup(SETTLE_S, what="settle"):
                await reply.wait_answered()
            raise

    async def _give_up(self, attempt: _Attempt, why: str) -> float:
        """Gives up a claim without an outcome; what is not ours any more is left alone. A call
        that was paid for counts, although its page is lost."""
        await self._release_claim(attempt, problems.page_discarded(why))
        return await self._put_back(attempt.work, 0.0)

    async def _release_claim(self, attempt: _Attempt, problem: Problem) -> None:
        ref, spent = attempt.work.message.ref, attempt.spent
        await tasks.release_claim(self.env, ref, attempt.task, spent=spent, problem=problem)

    async def _put_back(self, work: TaskAssignment, delay_s: float) -> float:
        """Returns a message that was held, once no beat can hide it again."""

        def release(reply: Reply[None]) -> Release:
            return Release(work.message.receipt, reply)

        with suppress(AskTimedOut):
            await self.heartbeater.ask(release, deadline_s=RELEASE_S)
        return await self._bounce(work, delay_s)

    async def _bounce(self, work: TaskAssignment, delay_s: float) -> float:
        await self.env.queue.bounce((work.message,), delay_s=delay_s)
        return delay_s

    def _release_early(self, work: TaskAssignment) -> None:
        # Without room for it, the beat finds the claim gone and forgets the work by itself.
        with suppress(MailboxFull):
            self.heartbeater.tell_nowait(Release(work.message.receipt))
