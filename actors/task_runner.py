"""TaskRunner: scrapes, stores and settles one claimed task (SPEC 6.2).

Owns:    one message, one lease and one claim, for as long as one call of `run` takes.
Hears:   nothing: it is told everything when it is started.
Says:    Hold and Release to the heartbeater, Settle to the writer of its shard.
Crashes: only by bug, and then alone: the message returns when its visibility ends.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import assert_never

import trio

from actors.board import WaitBoard
from actors.messages import (
    HeartbeaterMessage,
    Hold,
    Release,
    Settle,
    ShardWriterMessage,
    Work,
)
from actors.runtime import Address, MailboxFull, NoAnswer, Reply, bounded_cleanup
from conveyor.domain import settlement
from conveyor.domain.backpressure import bounce_delay_s
from conveyor.domain.model import RunFailure, Task
from conveyor.domain.settlement import (
    AlreadyDone,
    Claimed,
    HeldByOther,
    NoSuchTask,
    NotTaken,
    NoVerdict,
    Settled,
    SettleVerdict,
)
from conveyor.ports.errors import Unavailable
from conveyor.ports.gateway import Gateway, NotScraped, Outcome, Scraped
from conveyor.telemetry import Metrics
from conveyor.usecases import runs, tasks
from conveyor.usecases.env import Env
from conveyor.usecases.tasks import Finish, Retry

log = logging.getLogger(__name__)

SETTLE_S = 2.5
CLEANUP_S = 3.0
RELEASE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRunner:
    env: Env
    gateway: Gateway
    heartbeater: Address[HeartbeaterMessage]
    writers: Sequence[Address[ShardWriterMessage]]
    metrics: Metrics
    board: WaitBoard = field(default_factory=WaitBoard)

    async def run(self, work: Work) -> float | None:
        """Sees one message through; answers in how many seconds it will be back, if it will."""
        try:
            return await self._handle(work)
        except Unavailable as error:
            # Nothing is settled: the message returns by itself, the claim lapses.
            log.warning(
                "task put off", extra={"task": work.message.ref.task_id, "cause": str(error)}
            )
            return None

    async def _handle(self, work: Work) -> float | None:
        ref = work.message.ref
        match work.claim:
            case Claimed(task):
                return await self._try(work, task)
            case AlreadyDone():
                await runs.look(self.env, ref.job_id, ref.run_id)
                await self.env.queue.ack((work.message,))
                return None
            case HeldByOther(until):
                self.metrics.messages_bounced.inc()
                return await self._bounce(work, max(until - self.env.now(), 0.0) + 1.0)
            case NoSuchTask() | NotTaken():
                # Deleted, not visible yet, or not now: the run's own end removes the message.
                self.metrics.messages_bounced.inc()
                return await self._bounce(work, bounce_delay_s(work.message.receives))
            case _:
                assert_never(work.claim)

    async def _try(self, work: Work, task: Task) -> float | None:
        """Works under a claim, and gives it back if the work is cut off before an outcome."""
        is_over = False
        try:
            problem = settlement.exhausted(task)
            if problem is not None:
                verdict = tasks.judge_exhausted(self.env, work.message.ref, task, problem)
                delay_s = await self._settle(work, task, verdict)
            else:
                delay_s = await self._scrape(work, task)
            is_over = True
            return delay_s
        finally:
            if not is_over:
                with bounded_cleanup(CLEANUP_S):
                    await self._hand_back(work, task)

    async def _scrape(self, work: Work, task: Task) -> float | None:
        """Fetches under the heartbeat. What is left is to write, and that needs neither heartbeat
        nor lease: the claim has 50 s left, and a beat must not cut off a settle."""
        with trio.CancelScope() as scope:
            await self.heartbeater.post(
                Hold(work.lease_id, work.message, task.claim, scope, work.visit_id)
            )
            try:
                outcome = await self._fetch(work, task)
            finally:
                self._let_go(work)
        if scope.cancelled_caught:
            log.warning("work lost", extra={"task": task.task_id, "claim": task.claim})
            return await self._hand_back(work, task)
        work.make_room()
        return await self._judge(work, task, outcome)

    async def _fetch(self, work: Work, task: Task) -> Outcome:
        request = tasks.request_for(self.env, work.job, task)
        if work.toll is not None:
            work.toll.begin()
        outcome = await self.gateway.scrape(request)
        if work.toll is not None:
            work.toll.end(outcome)
        return outcome

    async def _judge(self, work: Work, task: Task, outcome: Outcome) -> float | None:
        ref = work.message.ref
        match outcome:
            case Scraped():
                # The body is durable before anything is settled.
                result = await tasks.store_body(self.env, ref, task, outcome)
                verdict = tasks.judge_success(self.env, ref, task, outcome, result)
                return await self._settle(work, task, verdict)
            case NotScraped(run_failure=RunFailure() as cause):
                detail = outcome.problem.detail or outcome.problem.title
                await tasks.hand_back(self.env, ref, task)
                await self._put_back(work, bounce_delay_s(work.message.receives))
                await runs.fail(self.env, work.run, cause, detail)
                return None
            case NotScraped():
                self.board.note_miss(ref.run_id, outcome.reason)
                judged = tasks.judge_failure(self.env, work.job, ref, task, outcome)
                return await self._settle(work, task, judged)
            case _:
                assert_never(outcome)

    async def _settle(self, work: Work, task: Task, verdict: Finish | Retry) -> float | None:
        """Has it written. The writer answers every settle, even one that it crashes over."""
        message = work.message if isinstance(verdict, Finish) else None
        ref = work.message.ref
        reply: Reply[SettleVerdict] = Reply()
        writer = self.writers[ref.shard % len(self.writers)]
        await writer.post(Settle(ref, task, verdict.change, message, reply))
        await self._wait_settled(reply)
        if isinstance(reply.result(), NoVerdict):
            raise Unavailable("the writer gave no verdict")
        if isinstance(verdict, Retry) and isinstance(reply.result(), Settled):
            return await self._put_back(work, verdict.delay_s)
        return None

    async def _wait_settled(self, reply: Reply[SettleVerdict]) -> None:
        """Whoever is cut off here has its page already: a group under way is given its time."""
        try:
            await reply.wait_answered()
        except trio.Cancelled:
            with bounded_cleanup(SETTLE_S, what="settle"):
                await reply.wait_answered()
            raise

    async def _hand_back(self, work: Work, task: Task) -> float:
        """Gives up a claim without an outcome; what is not ours any more is left alone."""
        await tasks.hand_back(self.env, work.message.ref, task)
        return await self._put_back(work, 0.0)

    async def _put_back(self, work: Work, delay_s: float) -> float:
        """Returns a message that was held, once no beat can hide it again."""

        def release(reply: Reply[None]) -> Release:
            return Release(work.message.receipt, reply)

        with suppress(NoAnswer):
            await self.heartbeater.ask(release, deadline_s=RELEASE_S)
        return await self._bounce(work, delay_s)

    async def _bounce(self, work: Work, delay_s: float) -> float:
        await self.env.queue.bounce((work.message,), delay_s=delay_s)
        return delay_s

    def _let_go(self, work: Work) -> None:
        # Without room for it, the beat finds the claim gone and forgets the work by itself.
        with suppress(MailboxFull):
            self.heartbeater.tell_nowait(Release(work.message.receipt))
