"""Dispatchers without permits: wrappers around the coordinator and the queue of a poller.

The product acquires a lease of the job before it receives a message. `UncappedLeases` grants the
poller every lease that it asks for, so that it always receives. `LateLeaseQueue` then acquires the
real leases for the messages that were received, and bounces the messages without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import trio

from conveyor.domain import limits
from conveyor.domain.ids import JobId, LeaseId, RunId
from conveyor.ports.coordinator import Coordinator
from conveyor.ports.queue import Message, Queue

# A receive returns after this time although no message got a lease: the poller allows a receive
# 10 s, and would lose the messages of a longer one until their visibility timeout.
RECEIVE_S = 5.0


class UncappedLeases:
    """A coordinator that grants every lease of a job. Everything else is the wrapped one's."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._numbers = count()

    async def acquire(
        self, job_id: JobId, run_id: RunId, *, count_max: int, cap: int, ttl_s: float
    ) -> list[LeaseId]:
        await trio.lowlevel.checkpoint()
        return [LeaseId(f"uncapped-{next(self._numbers)}") for _ in range(count_max)]

    async def renew(self, lease_ids: Sequence[LeaseId], *, ttl_s: float) -> frozenset[LeaseId]:
        await trio.lowlevel.checkpoint()
        return frozenset()

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        await trio.lowlevel.checkpoint()

    def __getattr__(self, method: str) -> Any:
        return getattr(self._coordinator, method)


class LateLeaseQueue:
    """A queue that finds out after a receive whether the job is at its cap. A message keeps its
    lease until it is acked or bounced. If no message got a lease, the next receive follows after
    `pause_s`, which is given the number of such receives in a row."""

    def __init__(
        self, queue: Queue, coordinator: Coordinator, *, cap: int, pause_s: Callable[[int], float]
    ) -> None:
        self._queue = queue
        self._coordinator = coordinator
        self._cap = cap
        self._pause_s = pause_s
        self._leases: dict[str, LeaseId] = {}

    async def receive(self, run_id: RunId, *, count_max: int, visibility_s: float) -> list[Message]:
        give_up_at = trio.current_time() + RECEIVE_S
        refusals = 0
        while True:
            messages = await self._queue.receive(
                run_id, count_max=count_max, visibility_s=visibility_s
            )
            if not messages:
                return []
            leases = await self._coordinator.acquire(
                messages[0].ref.job_id,
                run_id,
                count_max=len(messages),
                cap=self._cap,
                ttl_s=limits.LEASE_TTL_S,
            )
            leased, others = messages[: len(leases)], messages[len(leases) :]
            self._leases |= {
                message.receipt: lease_id for message, lease_id in zip(leased, leases, strict=True)
            }
            if others:
                await self._queue.bounce(others, delay_s=0.0)
            refusals += 1
            pause_s = self._pause_s(refusals)
            if leased or trio.current_time() + pause_s > give_up_at:
                return leased
            await trio.sleep(pause_s)

    async def ack(self, messages: Sequence[Message]) -> None:
        await self._queue.ack(messages)
        await self._release(messages)

    async def bounce(self, messages: Sequence[Message], *, delay_s: float) -> None:
        await self._queue.bounce(messages, delay_s=delay_s)
        await self._release(messages)

    async def _release(self, messages: Sequence[Message]) -> None:
        leases = [
            self._leases.pop(message.receipt)
            for message in messages
            if message.receipt in self._leases
        ]
        if leases:
            await self._coordinator.release(leases)

    def __getattr__(self, method: str) -> Any:
        return getattr(self._queue, method)
