"""ShardWriter: settles tasks in groups, then checks for completion, then acks (SPEC.md 4.4).

Owns:    the settles of each run that wait for more; one group of a run is written at a time.
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
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import trio

from actors.messages import Settle, ShardWriterMessage
from actors.runtime import Inbox, drain_nowait
from conveyor.domain.changes import Change, SettleChange
from conveyor.domain.ids import JobId, RunId, counter_shard_of
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
# Delays between the commits of one group, and between the checks for completion: 4.4 s in total.
# The fifth failure ends the series. A longer one blocks the run, and the task runners hold and
# retry their pages anyway; a completion is repeated when its last messages are delivered again.
_RETRY_S = (0.1, 0.3, 1.0, 3.0)


@dataclass(slots=True)
class _Group:
    """Settles of one run that wait for more, and since when."""

    began_at: float
    settles: list[Settle] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardWriter:
    """Writes the settles of one mailbox. `is_urgent` returns True when waiting for more settles
    would gain nothing or would delay fetches."""

    env: Context
    metrics: Metrics
    is_urgent: Callable[[], bool] = lambda: False

    async def run(self, inbox: Inbox[ShardWriterMessage]) -> None:
        waiting: dict[RunId, _Group] = {}
        busy: set[RunId] = set()
        try:
            async with inbox, trio.open_nursery() as nursery:
                while True:
                    await self._collect(inbox, waiting)
                    for run_id in [run_id for run_id in waiting if run_id not in busy]:
                        if self._is_due(waiting[run_id]):
                            busy.add(run_id)
                            group = waiting.pop(run_id).settles
                            nursery.start_soon(self._write, group, nursery, busy)
        finally:
            # A task runner waits for its verdict without a deadline.
            for left in waiting.values():
                _answer_all(left.settles)

    async def _collect(
        self, inbox: Inbox[ShardWriterMessage], waiting: dict[RunId, _Group]
    ) -> None:
        """Adds new settles to the groups of their runs. The wait delays no fetch, because a task
        that settles has passed its slot on."""
        new: list[Settle] = []
        if waiting:
            await trio.sleep(TICK_S)
        else:
            new.append(await inbox.receive())
            await trio.sleep(TICK_S)
        new += drain_nowait(inbox, self.env.config.pace.settle_max - len(new))
        for settle in new:
            group = waiting.get(settle.ref.run_id)
            if group is None:
                group = waiting[settle.ref.run_id] = _Group(trio.current_time())
            group.settles.append(settle)

    def _is_due(self, group: _Group) -> bool:
        pace = self.env.config.pace
        return (
            len(group.settles) >= pace.settle_max
            or trio.current_time() >= group.began_at + pace.settle_s
            or any(settle.is_last for settle in group.settles)
            or self.is_urgent()
        )

    async def _write(
        self, settles: Sequence[Settle], nursery: trio.Nursery, busy: set[RunId]
    ) -> None:
        """Writes the settles of one run. Those of other runs do not wait for them: a run whose
        rows the table throttles must not delay the runs of other callers."""
        settle_max = self.env.config.pace.settle_max
        left = list(settles)
        try:
            while left:
                group = left[:settle_max]
                verdicts = await self._commit_isolated(group)
                del left[: len(group)]
                for settle, verdict in zip(group, verdicts, strict=True):
                    settle.reply.send(verdict)
                self._count(group, verdicts)
                # In the background: the next group need not wait for these acks, and the engine may
                # write both together.
                nursery.start_soon(self._complete_and_ack, group, verdicts)
        finally:
            # After a crash or a cancellation: a task runner waits without a deadline.
            _answer_all(left)
            busy.discard(settles[0].ref.run_id)

    def _count(self, group: Sequence[Settle], verdicts: Sequence[SettleVerdict]) -> None:
        self.metrics.group_size.labels("settle").observe(len(group))
        for outcome, count in Counter(map(_outcome, group, verdicts)).items():
            self.metrics.task_outcomes.labels(*outcome).inc(count)

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
        changes = [self._counted(settle) for settle in group]
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

    def _counted(self, settle: Settle) -> Change:
        """Returns the change, on the counter row on which this process counts."""
        if settle.shard_count == 1 or not self.env.config.pace.counts_together:
            return settle.change
        assert isinstance(settle.change, SettleChange)
        shard = counter_shard_of(self.env.process_id, settle.shard_count)
        return settlement.count_together(settle.change, shard)

    async def _complete_and_ack(
        self, group: Sequence[Settle], verdicts: Sequence[SettleVerdict]
    ) -> None:
        """Checks for completion, then acks. In this order, redelivery repairs a crash between the
        two."""
        drained: set[tuple[JobId, RunId, int]] = set()
        messages: list[Message] = []
        for settle, verdict in zip(group, verdicts, strict=True):
            # A settle without a message is a retry: its message is bounced by the task runner.
            if isinstance(verdict, Settled) and settle.message is not None:
                messages.append(settle.message)
                if settlement.may_be_drained(verdict):
                    drained.add((settle.ref.job_id, settle.ref.run_id, settle.shard_count))
        try:
            for job_id, run_id, shard_count in sorted(drained):
                complete = partial(self._complete, job_id, run_id, shard_count)
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

    async def _complete(self, job_id: JobId, run_id: RunId, shard_count: int) -> None:
        """Completes the run if it is drained, with retries: the redelivery that would repeat the
        check comes half a minute later, which is long for the caller of a short list."""
        for delay_s in _RETRY_S:
            with suppress(Unavailable):
                await runs.complete_if_drained(self.env, job_id, run_id, shard_count)
                return
            await trio.sleep(delay_s)
        await runs.complete_if_drained(self.env, job_id, run_id, shard_count)


def _answer_all(settles: Sequence[Settle]) -> None:
    for settle in settles:
        settle.reply.send(OutcomeUnknown())


def _outcome(settle: Settle, verdict: SettleVerdict) -> tuple[str, str]:
    """Returns the metrics labels: the result, and the reason if the task failed."""
    if not isinstance(verdict, Settled):
        return "refused", ""
    if settle.message is None:
        return "retried", ""
    reason = settlement.failure_reason_of(settle.change)
    return ("successful", "") if reason is None else ("failed", reason)
