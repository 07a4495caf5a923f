"""MemoryQueue: the messages of each run in a dict, in the order of sending (SPEC.md 4.4)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from random import Random

import msgspec
import trio

from conveyor.domain.ids import RunId
from conveyor.domain.model import TaskRef
from conveyor.ports.clock import Clock
from conveyor.ports.errors import QueueGone
from conveyor.ports.queue import Depth, Message


class _Entry(msgspec.Struct):
    number: int
    ref: TaskRef
    visible_at: float
    receipt: str | None = None
    receives: int = 0


class MemoryQueue:
    def __init__(self, clock: Clock, random: Random) -> None:
        self._clock = clock
        self._random = random
        self._runs: dict[RunId, dict[int, _Entry]] = {}
        # By the latest receipt of each message. An older receipt is missing here, so it is invalid.
        self._latest: dict[str, _Entry] = {}
        self._sent_count = 0

    async def open_run(self, run_id: RunId) -> None:
        await trio.lowlevel.checkpoint()
        self.open_nowait(run_id)

    def open_nowait(self, run_id: RunId) -> None:
        self._runs.setdefault(run_id, {})

    async def close_run(self, run_id: RunId) -> None:
        await trio.lowlevel.checkpoint()
        for entry in self._runs.pop(run_id, {}).values():
            if entry.receipt is not None:
                del self._latest[entry.receipt]

    async def send(self, refs: Sequence[TaskRef]) -> None:
        await trio.lowlevel.checkpoint()
        for ref in refs:
            if ref.run_id not in self._runs:
                raise QueueGone(ref.run_id)
        self.enqueue_nowait(refs)

    def enqueue_nowait(self, refs: Sequence[TaskRef]) -> None:
        """Sends the references of an effect. Creates a missing queue, because an effect must not
        fail."""
        for ref in refs:
            self._sent_count += 1
            entry = _Entry(self._sent_count, ref, visible_at=self._clock.steady())
            self._runs.setdefault(ref.run_id, {})[entry.number] = entry

    async def receive(self, run_id: RunId, *, count_max: int, visibility_s: float) -> list[Message]:
        await trio.lowlevel.checkpoint()
        if run_id not in self._runs:
            raise QueueGone(run_id)
        now = self._clock.steady()
        visible = (entry for entry in self._runs[run_id].values() if entry.visible_at <= now)
        # The order is by the instant at which a message became visible, so a bounced message goes
        # to the end of the queue.
        oldest = heapq.nsmallest(
            count_max, visible, key=lambda message: (message.visible_at, message.number)
        )
        return [self._deliver(entry, visible_at=now + visibility_s) for entry in oldest]

    async def extend(self, messages: Sequence[Message], *, visibility_s: float) -> frozenset[str]:
        await trio.lowlevel.checkpoint()
        for message in messages:
            self._show_after(message, delay_s=visibility_s)
        return frozenset(message.receipt for message in messages) - self._latest.keys()

    async def ack(self, messages: Sequence[Message]) -> None:
        await trio.lowlevel.checkpoint()
        for message in messages:
            entry = self._latest.pop(message.receipt, None)
            if entry is not None:
                del self._runs[entry.ref.run_id][entry.number]

    async def bounce(self, messages: Sequence[Message], *, delay_s: float) -> None:
        await trio.lowlevel.checkpoint()
        for message in messages:
            self._show_after(message, delay_s=delay_s)

    async def depth(self, run_id: RunId) -> Depth:
        await trio.lowlevel.checkpoint()
        now = self._clock.steady()
        entries = self._runs.get(run_id, {}).values()
        visible_count = sum(entry.visible_at <= now for entry in entries)
        return Depth(visible=visible_count, hidden=len(entries) - visible_count)

    def messages(self) -> dict[RunId, list[TaskRef]]:
        """Returns the references in every queue, for checkers."""
        return {
            run_id: [message.ref for message in held.values()]
            for run_id, held in self._runs.items()
        }

    def _deliver(self, entry: _Entry, *, visible_at: float) -> Message:
        # The previous receipt becomes invalid: only the latest one may ack or extend.
        if entry.receipt is not None:
            del self._latest[entry.receipt]
        entry.receipt = f"{self._random.getrandbits(128):032x}"
        entry.receives += 1
        entry.visible_at = visible_at
        self._latest[entry.receipt] = entry
        return Message(entry.receipt, entry.ref, entry.receives)

    def _show_after(self, message: Message, *, delay_s: float) -> None:
        entry = self._latest.get(message.receipt)
        if entry is not None:
            entry.visible_at = self._clock.steady() + delay_s
