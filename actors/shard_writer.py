"""ShardWriter: settles tasks in groups, then checks for completion, then acks (SPEC.md 4.4).

Owns:    only the current group of settles.
Hears:   Settle.
Says:    the verdict, on the Reply of each Settle.
Crashes: only by bug outside of a settle. While the store is unavailable, the writer answers each
         settle of a group with OutcomeUnknown, and the task runners send their settles again. A
         settle that crashes the writer gets NotSettled; the rest of its group is written.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from actors.messages import Settle, ShardWriterMessage
from actors.runtime import Inbox, drain_nowait
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.run import settlement
from conveyor.domain.run.settlement import NotSettled, OutcomeUnknown, Settled, SettleVerdict
from conveyor.ports.errors import Unavailable
from conveyor.ports.queue import Message
from conveyor.telemetry import Metrics
from conveyor.usecases.context import Context
from conveyor.usecases.crash_isolation import Crash, isolate
from conveyor.usecases.run import runs

log = logging.getLogger(__name__)

# How often the writer checks for more settles and for urgency while it gathers a group. It is also
# the shortest time that a settle waits.
TICK_S = 0.01
# Delays between the commits of one group, 4.4 s in total; the fifth failure ends the group. A
# longer series blocks the shard, and the task runners hold and retry their pages anyway.
_RETRY_S = (0.1, 0.3, 1.0, 3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardWriter:
    """Writes the settles of one mailbox. `is_urgent` returns True when waiting for more settles
    would gain nothing or would delay fetches."""

    env: Context
    metrics: Metrics
    is_urgent: Callable[[], bool] = lambda: False

    async def run(self, inbox: Inbox[ShardWriterMessage]) -> None:
        async with inbox, trio.open_nursery() as nursery:
            while True:
                group = await self._gather(inbox)
                try:
                    verdicts = await self._commit_isolated(group)
                except BaseException:
                    # Answer before the crash or cancellation continues: a task runner waits for its
                    # verdict without a deadline.
                    for settle in group:
                        settle.reply.send(OutcomeUnknown())
                    raise
                for settle, verdict in zip(group, verdicts, strict=True):
                    settle.reply.send(verdict)
                self._count(group, verdicts)
                # In the background: the next group need not wait for these acks, and the engine may
                # write both together.
                nursery.start_soon(self._complete_and_ack, group, verdicts)

    def _count(self, group: Sequence[Settle], verdicts: Sequence[SettleVerdict]) -> None:
        self.metrics.group_size.labels("settle").observe(len(group))
        for outcome, count in Counter(map(_outcome, group, verdicts)).items():
            self.metrics.task_outcomes.labels(*outcome).inc(count)

    async def _gather(self, inbox: Inbox[ShardWriterMessage]) -> list[Settle]:
        """Collects a group of settles, so that one commit serves several. The wait delays no fetch,
        because a task that settles has passed its slot on."""
        pace = self.env.config.pace
        group = [await inbox.receive()]
        ends_at = trio.current_time() + pace.settle_s
        while True:
            await trio.sleep(TICK_S)
            group += drain_nowait(inbox, pace.settle_max - len(group))
            is_whole = len(group) >= pace.settle_max or trio.current_time() >= ends_at
            if is_whole or self.is_urgent():
                return group

    async def _commit_isolated(self, group: Sequence[Settle]) -> list[SettleVerdict]:
        """Returns the verdicts of a group. If the commit crashes, halves the group until the settle
        that causes the crash is alone."""
        try:
            verdicts = await isolate(
                partial(self._commit, group),
                "a settle",
                extra={"count": len(group), "first": group[0].ref.task_id},
            )
        except Unavailable as error:
            log.warning(
                "settles abandoned: engine unavailable",
                extra={"count": len(group), "cause": str(error)},
            )
            return [OutcomeUnknown()] * len(group)
        if not isinstance(verdicts, Crash):
            return verdicts
        if len(group) == 1:
            return [NotSettled()]
        half = len(group) // 2
        return [
            *await self._commit_isolated(group[:half]),
            *await self._commit_isolated(group[half:]),
        ]

    async def _commit(self, group: Sequence[Settle]) -> list[SettleVerdict]:
        """Commits the group, with retries. Each change is guarded by its claim number, so repeating
        one of unknown outcome is safe."""
        changes = [settle.change for settle in group]
        for delay_s in _RETRY_S:
            try:
                verdicts = await self.env.store.commit(changes)
            except Unavailable as error:
                log.warning("settles delayed", extra={"count": len(group), "cause": str(error)})
                await trio.sleep(delay_s)
            else:
                break
        else:
            verdicts = await self.env.store.commit(changes)
        return [
            # A repeat may be refused because of the writer's own earlier write. `settle_result`
            # recognizes that case as settled.
            settlement.settle_result(verdict, settle.task)
            for verdict, settle in zip(verdicts, group, strict=True)
        ]

    async def _complete_and_ack(
        self, group: Sequence[Settle], verdicts: Sequence[SettleVerdict]
    ) -> None:
        """Checks for completion, then acks. In this order, redelivery repairs a crash between the
        two."""
        drained: set[tuple[JobId, RunId]] = set()
        messages: list[Message] = []
        for settle, verdict in zip(group, verdicts, strict=True):
            # A settle without a message is a retry: its message is bounced by the task runner.
            if isinstance(verdict, Settled) and settle.message is not None:
                messages.append(settle.message)
                if settlement.may_be_drained(verdict):
                    drained.add((settle.ref.job_id, settle.ref.run_id))
        try:
            for job_id, run_id in sorted(drained):
                complete = partial(runs.complete_if_done, self.env, job_id, run_id)
                if isinstance(await isolate(complete, "a run", extra={"run": run_id}), Crash):
                    # Do not ack: each redelivery repeats the completion check, after growing
                    # delays.
                    messages = [message for message in messages if message.ref.run_id != run_id]
            if messages:
                await self.env.queue.ack(messages)
        except Unavailable as error:
            # The messages are redelivered. The next worker finds the tasks ended, checks for
            # completion and acks.
            log.warning("acks skipped", extra={"count": len(messages), "cause": str(error)})


def _outcome(settle: Settle, verdict: SettleVerdict) -> tuple[str, str]:
    """Returns the metrics labels: the result, and the reason if the task failed."""
    if not isinstance(verdict, Settled):
        return "refused", ""
    if settle.message is None:
        return "retried", ""
    reason = settlement.failure_reason_of(settle.change)
    return ("successful", "") if reason is None else ("failed", reason)
