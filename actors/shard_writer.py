"""ShardWriter: settles tasks in groups, then looks for completion, then acks (SPEC.md 4.4).

Owns:    nothing but the group in hand.
Hears:   Settle.
Says:    the verdict, on the slip that came with the settle.
Crashes: only by bug outside of a settle. While the store stays away, each group is told that
         nobody knows, and those who sent it send it again; a settle that crashes the writer is
         told so, and the others of its group are written without it.
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

TICK_S = 0.01
_RETRY_S = (0.1, 0.3, 1.0, 3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardWriter:
    """`is_urgent` when waiting for company would gain nothing, or hold up fetches."""

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
                    for settle in group:
                        settle.reply.send(OutcomeUnknown())
                    raise
                for settle, verdict in zip(group, verdicts, strict=True):
                    settle.reply.send(verdict)
                self._count(group, verdicts)
                # The next group need not wait for these acks; the engine writes both together.
                nursery.start_soon(self._complete_and_ack, group, verdicts)

    def _count(self, group: Sequence[Settle], verdicts: Sequence[SettleVerdict]) -> None:
        self.metrics.group_size.labels("settle").observe(len(group))
        for outcome, count in Counter(map(_outcome, group, verdicts)).items():
            self.metrics.tasks_settled.labels(outcome).inc(count)

    async def _gather(self, inbox: Inbox[ShardWriterMessage]) -> list[Settle]:
        """One settle rarely comes alone: a short wait makes one commit of several. It holds up no
        fetch: a task that settles has passed its slot on."""
        pace = self.env.policy.pace
        group = [await inbox.receive()]
        ends_at = trio.current_time() + pace.settle_s
        while True:
            await trio.sleep(TICK_S)
            group += drain_nowait(inbox, pace.settle_max - len(group))
            is_whole = len(group) >= pace.settle_max or trio.current_time() >= ends_at
            if is_whole or self.is_urgent():
                return group

    async def _commit_isolated(self, group: Sequence[Settle]) -> list[SettleVerdict]:
        """The verdicts of a group. One that crashes the writer is found by halving the group."""
        try:
            verdicts = await isolate(
                partial(self._commit, group),
                "a settle",
                extra={"count": len(group), "first": _name(group[0])},
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
        """Every change is fenced by its claim, so repeating one of unknown outcome is safe."""
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
            settlement.settle_result(verdict, settle.task)
            for verdict, settle in zip(verdicts, group, strict=True)
        ]

    async def _complete_and_ack(
        self, group: Sequence[Settle], verdicts: Sequence[SettleVerdict]
    ) -> None:
        """Write, then look, then ack: a crash in between is repaired by redelivery."""
        drained: set[tuple[JobId, RunId]] = set()
        messages: list[Message] = []
        for settle, verdict in zip(group, verdicts, strict=True):
            if isinstance(verdict, Settled) and settle.message is not None:
                messages.append(settle.message)
                if settlement.may_be_drained(verdict):
                    drained.add((settle.ref.job_id, settle.ref.run_id))
        try:
            for job_id, run_id in sorted(drained):
                look = partial(runs.complete_if_done, self.env, job_id, run_id)
                if isinstance(await isolate(look, "a run", extra={"run": run_id}), Crash):
                    # Not acked: whoever receives these looks again, later and later.
                    messages = [each for each in messages if each.ref.run_id != run_id]
            if messages:
                await self.env.queue.ack(messages)
        except Unavailable as error:
            # Redelivery finds these tasks done, looks again and acks.
            log.warning("acks skipped", extra={"count": len(messages), "cause": str(error)})


def _name(settle: Settle) -> str:
    return settle.ref.task_id


def _outcome(settle: Settle, verdict: SettleVerdict) -> str:
    """What the metrics call it: a task that is over, one that comes back, or a refusal."""
    if not isinstance(verdict, Settled):
        return "refused"
    return "settled" if settle.message is not None else "retry"
