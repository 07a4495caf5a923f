"""Doorkeeper: lets the tasks of one poller through to hosts that take few at a time (SPEC.md 4.8).

A task whose host is full is parked, unclaimed and uncounted; where there is no room for it, it goes
back to the queue until about its turn.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import trio

from actors.parking import ParkingLot
from conveyor.domain import hosts, limits
from conveyor.domain.changes import TaskKey
from conveyor.domain.hosts import HostLimit, HostLimits
from conveyor.domain.ids import LeaseId
from conveyor.domain.lifecycle import TASK_TERMINAL
from conveyor.domain.model import Job
from conveyor.domain.urls import host_of
from conveyor.ports.coordinator import Door
from conveyor.ports.errors import Unavailable
from conveyor.ports.queue import Message
from conveyor.telemetry import Metrics
from conveyor.usecases.env import Env

_FETCH_S = 1.0
_WEIGHT = 0.3
_LEAD = 0.5  # Somebody should be there when a place is free: half a turn early.


@dataclass(frozen=True, slots=True)
class Visit:
    """A message that may be worked on now: at its host, if that is limited."""

    message: Message
    host: str | None = None
    lease_id: LeaseId | None = None


class Doorkeeper:
    """Remembers of each host when the next message has its turn, and how long its fetches take."""

    def __init__(self, env: Env, job: Job, host_limits: HostLimits, metrics: Metrics) -> None:
        self._env = env
        self._job = job
        self._limits = host_limits
        self._metrics = metrics
        self._turn_at: dict[str, float] = {}
        self._next_turn_at: dict[str, float] = {}
        self._full_until: dict[str, float] = {}
        self._fetch_s: dict[str, float] = {}
        self._due: list[float] = []
        self.lot = ParkingLot(env.queue)

    def take_parked(self, count_max: int) -> list[tuple[Message, str]]:
        """Messages whose hosts may have room now, no more of each than it may have room for."""
        taken: list[tuple[Message, str]] = []
        for host in [each for each in self.lot.hosts if self._is_open(each)]:
            count = min(count_max - len(taken), self._at_once(host))
            taken += [(message, host) for message in self.lot.take(host, count)]
        return taken

    async def admit(
        self, parked: Sequence[tuple[Message, str]], fresh: Sequence[Message]
    ) -> list[Visit]:
        """Those that may go through; the others wait here, or are on their way back."""
        named: list[tuple[Message, str | None]] = [*parked]
        named += [(message, await self._host_of(message)) for message in fresh]
        asked = [number for number, (_, host) in enumerate(named) if self._is_open(host)]
        leases = dict(zip(asked, await self._enter([named[n][1] for n in asked]), strict=True))
        admitted: list[Visit] = []
        refused: list[tuple[Message, str]] = []
        for number, (message, host) in enumerate(named):
            lease_id = leases.get(number)
            if host is None or lease_id is not None:
                admitted.append(Visit(message, host, lease_id))
            else:
                refused.append((message, host))
        await self._put_off(refused)
        return admitted

    def note_fetch(self, visit: Visit, seconds: float) -> None:
        """A fetch has ended: its host has room, and we know its pace."""
        if visit.host is not None:
            self._full_until.pop(visit.host, None)
            before = self._fetch_s.get(visit.host, seconds)
            self._fetch_s[visit.host] = before + _WEIGHT * (seconds - before)

    def until_due(self) -> float:
        """Seconds until the next of those that had to wait has its turn."""
        now = trio.current_time()
        while self._due and self._due[0] <= now:
            heapq.heappop(self._due)
        turns = [self._full_until.get(host, now) for host in self.lot.hosts]
        return max(min([*self._due[:1], *turns], default=math.inf) - now, 0.0)

    async def _host_of(self, message: Message) -> str | None:
        ref = message.ref
        task = await self._env.store.read(TaskKey(ref.job_id, ref.run_id, ref.task_id, ref.shard))
        if task is None or task.status in TASK_TERMINAL:
            return None
        host = host_of(task.url)
        is_limited = host is not None and self._limits.limit_for(host) != HostLimit()
        return host if is_limited else None

    def _is_open(self, host: str | None) -> bool:
        return host is not None and self._full_until.get(host, 0.0) <= trio.current_time()

    async def _enter(self, asked: Sequence[str | None]) -> list[LeaseId | None]:
        if not asked:
            return []
        doors = [self._door(host) for host in asked if host is not None]
        return await self._env.coordinator.enter(doors, ttl_s=limits.LEASE_TTL_S)

    def _door(self, host: str) -> Door:
        limit = self._limits.limit_for(host)
        return Door(
            self._job.job_id,
            host,
            cap=limit.concurrency or self._job.max_inflight,
            spacing_s=1.0 / limit.rate_per_s if limit.rate_per_s else 0.0,
        )

    def _at_once(self, host: str) -> int:
        limit = self._limits.limit_for(host)
        if limit.concurrency is not None:
            return limit.concurrency
        return 1 + math.ceil((limit.rate_per_s or 0.0) * limits.HOST_SLACK_S)

    async def _put_off(self, refused: Sequence[tuple[Message, str]]) -> None:
        async with trio.open_nursery() as nursery:
            for message, host in refused:
                if self.lot.is_full:
                    nursery.start_soon(self._bounce, message, self._wait_s(host, message))
                else:
                    self.lot.park(host, message)
                self._note_full(host)

    async def _bounce(self, message: Message, delay_s: float) -> None:
        self._metrics.messages_bounced.inc()
        heapq.heappush(self._due, trio.current_time() + delay_s)
        with suppress(Unavailable):  # It comes back by itself.
            await self._env.queue.bounce((message,), delay_s=delay_s)

    def _wait_s(self, host: str, message: Message) -> float:
        """The next turn that is free at this host, by what we know of its pace. Who had a turn and
        came too early does not line up behind all the others again."""
        limit = self._limits.limit_for(host)
        now = trio.current_time()
        turns = self._turn_at if message.receives == 1 else self._next_turn_at
        turn_s = self._turn_s(host)
        is_sure = limit.concurrency is None or host in self._fetch_s
        turn_at = max(turns.get(host, 0.0), now)
        wait_s = hosts.wait_s(turn_at + (1 - _LEAD) * turn_s, now=now, is_sure=is_sure)
        turns[host] = min(turn_at + turn_s, now + wait_s + turn_s)
        return wait_s

    def _turn_s(self, host: str) -> float:
        fetch_s = self._fetch_s.get(host, _FETCH_S)
        return hosts.turn_s(self._limits.limit_for(host), fetch_s=fetch_s)

    def _note_full(self, host: str) -> None:
        until = trio.current_time() + _LEAD * min(self._turn_s(host), _FETCH_S)
        self._full_until[host] = until
