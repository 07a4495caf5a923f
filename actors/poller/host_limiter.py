"""HostLimiter: admits the tasks of one poller to hosts with limits (SPEC.md 4.8).

A task whose host has no room is held, without a claim and without an attempt. If there is no space
to hold its message, the message is bounced until about its turn.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import KeysView, Sequence
from contextlib import suppress
from dataclasses import dataclass

import trio

from conveyor.domain import limits, timing
from conveyor.domain.changes import JobKey
from conveyor.domain.ids import LeaseId
from conveyor.domain.lifecycle import TASK_TERMINAL
from conveyor.domain.model import HostLimit, HostLimits, Job, JobType, Task
from conveyor.domain.queries import TasksAt
from conveyor.domain.submit.target import host_of
from conveyor.ports.coordinator import HostPool
from conveyor.ports.errors import Unavailable
from conveyor.ports.queue import Message, Queue
from conveyor.telemetry import Metrics
from conveyor.usecases.context import Context

# Assumed duration of a fetch at a host until one has ended.
_FETCH_ESTIMATE_S = 1.0
# Weight of the newest fetch in the moving average. A larger weight follows changes faster, and
# single slow pages too.
_WEIGHT = 0.3
# A message returns half a turn before its host is expected to have room, because an unused place at
# a host is lost and a message that is early only waits.
_EARLY_TURNS = 0.5
# Messages whose turns are this close are bounced in one call, because calls of SQS have a price. It
# rounds delays to seconds anyway.
_BOUNCE_S = 1.0
# Limits are read again this much earlier than a crawl relies on it.
_REFRESH_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class AdmittedMessage:
    """A message that may be worked on now, with a lease at its host if the host has a limit."""

    message: Message
    host: str | None = None
    lease_id: LeaseId | None = None


class HostLimiter:
    """Keeps, for each host, when the next message has its turn and how long its fetches take."""

    def __init__(self, env: Context, job: Job, host_limits: HostLimits, metrics: Metrics) -> None:
        self._env = env
        self._job = job
        self._limits = host_limits
        # The limits of a crawl grow while it runs, by the crawl delays of its hosts.
        is_fixed = job.type is not JobType.CRAWL
        self._fresh_until = math.inf if is_fixed else -math.inf
        self._metrics = metrics
        self._turn_at: dict[str, float] = {}
        self._next_turn_at: dict[str, float] = {}
        self._full_until: dict[str, float] = {}
        self._fetch_s: dict[str, float] = {}
        self._due: list[float] = []
        self.held = HeldMessages(env.queue)

    def pop_held(self, count_max: int) -> list[tuple[Message, str]]:
        """Takes held messages whose hosts may have room, for each host no more than it may have
        room for."""
        messages: list[tuple[Message, str]] = []
        for host in [host for host in self.held.hosts if self._is_open(host)]:
            count = min(count_max - len(messages), self._concurrency(host))
            messages += [(message, host) for message in self.held.pop(host, count)]
        return messages

    async def acquire_hosts(
        self, held: Sequence[tuple[Message, str]], new: Sequence[Message]
    ) -> list[AdmittedMessage]:
        """Returns the messages that are admitted. The others are held or bounced."""
        await self._refresh_limits()
        # Held messages first: they have waited longer than the new ones.
        candidates: list[tuple[Message, str | None]] = [*held]
        candidates += await self._with_hosts(new)
        # Only hosts that may have room: a refusal costs a call to the coordinator.
        indexes = [index for index, (_, host) in enumerate(candidates) if self._is_open(host)]
        lease_ids = await self._acquire([candidates[index][1] for index in indexes])
        leases = dict(zip(indexes, lease_ids, strict=True))
        admitted: list[AdmittedMessage] = []
        refused: list[tuple[Message, str]] = []
        for index, (message, host) in enumerate(candidates):
            lease_id = leases.get(index)
            if host is None or lease_id is not None:
                admitted.append(AdmittedMessage(message, host, lease_id))
            else:
                refused.append((message, host))
        await self._hold_or_bounce(refused)
        return admitted

    def record_duration(self, host: str | None, seconds: float) -> None:
        """Records the end of a fetch: its host has room, and its duration updates the average."""
        if host is not None:
            self._full_until.pop(host, None)
            before = self._fetch_s.get(host, seconds)
            self._fetch_s[host] = before + _WEIGHT * (seconds - before)

    def describe_wait(self) -> str | None:
        """Names the host for which the most messages are held; None if none are."""
        host = self.held.longest
        if host is None:
            return None
        limit = self._limits.limit_for(host)
        parts = [f"{limit.concurrency:,} at once"] if limit.concurrency else []
        parts += [f"{limit.rate_per_s:g} a second"] if limit.rate_per_s else []
        others = len(self.held.hosts) - 1
        more = f"; {others:,} more host{'s wait' if others > 1 else ' waits'}" if others else ""
        return f"pages of {host} wait for its limit of {' and '.join(parts)}{more}"

    def until_due(self) -> float:
        """Returns the seconds until the next held or bounced message has its turn."""
        now = trio.current_time()
        while self._due and self._due[0] <= now:
            heapq.heappop(self._due)
        turns = [self._full_until.get(host, now) for host in self.held.hosts]
        return max(min([*self._due[:1], *turns], default=math.inf) - now, 0.0)

    async def _refresh_limits(self) -> None:
        now = trio.current_time()
        if now < self._fresh_until:
            return
        self._fresh_until = now + limits.CRAWL_LIMITS_S * _REFRESH_SHARE
        job = await self._env.store.read(JobKey(self._job.job_id))
        if job is not None and job.host_limits is not None:
            self._limits = job.host_limits

    async def _with_hosts(self, messages: Sequence[Message]) -> list[tuple[Message, str | None]]:
        """Reads the rows of the messages together, and returns each message with its host if that
        has a limit."""
        refs = {message.ref.task_id: message.ref for message in messages}
        rows = await self._env.store.find(TasksAt(refs=tuple(refs.values()))) if refs else []
        tasks = {row.task_id: row for row in rows}
        return [
            (message, self._limited_host(tasks.get(message.ref.task_id))) for message in messages
        ]

    def _limited_host(self, task: Task | None) -> str | None:
        # No host lease for a task that will not be fetched: its message is only acked or bounced,
        # or it is a duplicate.
        if task is None or task.status in TASK_TERMINAL or task.duplicate_of is not None:
            return None
        host = host_of(task.url)
        is_limited = host is not None and self._limits.limit_for(host) != HostLimit()
        return host if is_limited else None

    def _is_open(self, host: str | None) -> bool:
        return host is not None and self._full_until.get(host, 0.0) <= trio.current_time()

    async def _acquire(self, hosts: Sequence[str | None]) -> list[LeaseId | None]:
        if not hosts:
            return []
        pools = [self._pool(host) for host in hosts if host is not None]
        return await self._env.coordinator.acquire_hosts(pools, ttl_s=limits.LEASE_TTL_S)

    def _pool(self, host: str) -> HostPool:
        limit = self._limits.limit_for(host)
        return HostPool(
            self._job.job_id,
            host,
            cap=limit.concurrency or self._job.max_inflight,
            spacing_s=1.0 / limit.rate_per_s if limit.rate_per_s else 0.0,
        )

    def _concurrency(self, host: str) -> int:
        limit = self._limits.limit_for(host)
        if limit.concurrency is not None:
            return limit.concurrency
        # With a rate only: as many as may start at once when lateness is made up for.
        return 1 + math.ceil((limit.rate_per_s or 0.0) * limits.HOST_SLACK_S)

    async def _hold_or_bounce(self, refused: Sequence[tuple[Message, str]]) -> None:
        bounced: defaultdict[int, list[tuple[Message, float]]] = defaultdict(list)
        for message, host in refused:
            if self.held.is_full:
                delay_s = self._wait_s(host, message)
                bounced[int(delay_s / _BOUNCE_S)].append((message, delay_s))
            else:
                self.held.hold(host, message)
            self._mark_full(host)
        async with trio.open_nursery() as nursery:
            for group in bounced.values():
                nursery.start_soon(self._bounce, group)

    async def _bounce(self, group: Sequence[tuple[Message, float]]) -> None:
        """Bounces messages together, until the first of them has its turn."""
        self._metrics.messages_bounced.inc(len(group))
        delay_s = min(delay_s for _, delay_s in group)
        heapq.heappush(self._due, trio.current_time() + delay_s)
        # The messages return after their visibility timeout.
        with suppress(Unavailable):
            await self._env.queue.bounce([message for message, _ in group], delay_s=delay_s)

    def _wait_s(self, host: str, message: Message) -> float:
        """Returns the seconds until the next free turn at this host, estimated by its pace. A
        message that was received before has its own sequence of turns, so that a message that
        returned too early does not wait behind all new ones again."""
        limit = self._limits.limit_for(host)
        now = trio.current_time()
        turns = self._turn_at if message.receives == 1 else self._next_turn_at
        turn_s = self._interval_s(host)
        is_sure = limit.concurrency is None or host in self._fetch_s
        turn_at = max(turns.get(host, 0.0), now)
        wait_s = timing.host_wait_s(turn_at + (1 - _EARLY_TURNS) * turn_s, now=now, is_sure=is_sure)
        # Bounded by the delay that is really used, or the turns of a slow host would move ever
        # further into the future.
        turns[host] = min(turn_at + turn_s, now + wait_s + turn_s)
        return wait_s

    def _interval_s(self, host: str) -> float:
        fetch_s = self._fetch_s.get(host, _FETCH_ESTIMATE_S)
        return timing.host_interval_s(self._limits.limit_for(host), fetch_s=fetch_s)

    def _mark_full(self, host: str) -> None:
        until = trio.current_time() + _EARLY_TURNS * min(self._interval_s(host), _FETCH_ESTIMATE_S)
        self._full_until[host] = until


# HeldMessages: received messages whose hosts are at their limit, until there is room (SPEC.md 4.8).
#
# A held message has no slot, lease or claim. If its receipt lapses, another worker has received it.


class HeldMessages:
    """Space for `HELD_MESSAGES_MAX` messages, in order of arrival for each host."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._by_host: dict[str, deque[Message]] = {}
        self._count = 0

    @property
    def is_full(self) -> bool:
        return self._count >= limits.HELD_MESSAGES_MAX

    @property
    def hosts(self) -> KeysView[str]:
        return self._by_host.keys()

    @property
    def longest(self) -> str | None:
        """The host with the most held messages."""
        return max(self._by_host, key=lambda host: len(self._by_host[host]), default=None)

    def hold(self, host: str, message: Message) -> None:
        """Appends the message to those of its host."""
        assert not self.is_full
        self._by_host.setdefault(host, deque()).append(message)
        self._count += 1

    def pop(self, host: str, count_max: int) -> list[Message]:
        """Takes the oldest messages of the host."""
        waiting = self._by_host[host]
        messages = [waiting.popleft() for _ in range(min(count_max, len(waiting)))]
        self._count -= len(messages)
        if not waiting:
            del self._by_host[host]
        return messages

    async def extend_forever(self) -> None:
        """Keeps the messages hidden. Messages whose receipts were lost are forgotten."""
        while True:
            # 20 s of the 45 s that a message stays hidden, so that one call may fail.
            await trio.sleep(2 * limits.HEARTBEAT_S)
            held = [message for waiting in self._by_host.values() for message in waiting]
            if not held:
                continue
            try:
                lost = await self._queue.extend(held, visibility_s=limits.VISIBILITY_S)
            except Unavailable:
                # The next call still comes before the messages return.
                continue
            self._forget(lost)

    def _forget(self, receipts: frozenset[str]) -> None:
        remaining = [
            (host, message)
            for host, waiting in self._by_host.items()
            for message in waiting
            if message.receipt not in receipts
        ]
        self._by_host, self._count = {}, 0
        for host, message in remaining:
            self.hold(host, message)

    async def release_all(self) -> None:
        """Bounces all held messages without a delay, so that any worker can receive them."""
        held = [message for host in list(self.hosts) for message in self.pop(host, self._count)]
        if held:
            await self._queue.bounce(held, delay_s=0.0)
