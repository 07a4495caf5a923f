"""The modelled Redis: one primary, its failovers, and the connections of processes to it
(docs/simulator.md, Models)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import trio
from coredis.exceptions import ResponseError

from conveyor.engines.redis.connection import DEADLINE_S, Script
from conveyor.ports.clock import Clock
from conveyor.simulation.models.fault_source import FaultSource
from conveyor.simulation.models.network import Network
from conveyor.simulation.models.redis.keyspace import Keyspace
from conveyor.simulation.models.redis.lua import Lua

# Longer than a failover loses writes (`RedisFaults.failover_lost_s`).
KEPT_S = 30.0
# The number of unread messages after which a subscriber is disconnected.
UNREAD_MAX = 1000

T = TypeVar("T")
_UNREACHABLE = partial(ConnectionRefusedError, "nobody listens there")
_CUT = partial(ConnectionResetError, "the connection closed")
_SILENT = partial(TimeoutError, "no answer")


@dataclass(slots=True, kw_only=True)
class RedisModel:
    """`old` is a deposed primary to which some connections still talk. `down_until` is the end of
    an outage."""

    clock: Clock
    fault_source: FaultSource
    primary: Keyspace = field(init=False)
    old: Keyspace | None = None
    down_until: float = 0.0
    _old_until: float = 0.0
    _lua: Lua = field(default_factory=Lua)
    _network: Network = field(init=False)
    _links: list[ModelRedisConnection] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.primary = Keyspace(self.clock.now, KEPT_S)
        self._network = Network(
            clock=self.clock, fault_source=self.fault_source, errors=(OSError, ResponseError)
        )

    def link(self) -> ModelRedisConnection:
        """Opens the connection of one more process."""
        link = ModelRedisConnection(self)
        self._links.append(link)
        return link

    async def ask(self, link: ModelRedisConnection, do: Callable[[Keyspace], T]) -> T:
        """Makes one call over a connection, with the faults of the server and the network."""
        faults = self.fault_source.service_rates.redis
        slow_s = 0.0
        if self.fault_source.occurs("redis.slow", faults.slow_rate):
            slow_s = self.fault_source.seconds(faults.slow_s)
        self._fail()
        if self.is_down:
            await trio.lowlevel.checkpoint()
            raise _UNREACHABLE()
        return await self._network.send(
            self._network.draw_delay(DEADLINE_S, slow_s=slow_s),
            lambda: do(self._of(link)),
            refusals=[_UNREACHABLE, _CUT],
            losses=[_CUT],
            too_late=_SILENT,
        )

    def run(self, space: Keyspace, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
        faults = self.fault_source.service_rates.redis
        # A Redis server kills only scripts that have not written, so the fault comes before the
        # script.
        if self.fault_source.occurs("redis.killed", faults.killed_rate):
            raise ResponseError("Error running script: Script killed by user with SCRIPT KILL")
        return self._lua.run(script.text, keys, args, space.call)

    def publish(self, link: ModelRedisConnection, channel: str, text: str) -> None:
        """Delivers a message to the subscribers on the same side of a split; a subscriber that is
        disconnected misses later ones."""
        for other_link in self._links:
            if other_link.is_on_old_primary == link.is_on_old_primary:
                other_link.deliver(channel, text)
        if self.fault_source.occurs("redis.deaf", self.fault_source.service_rates.redis.deaf_rate):
            self.fault_source.one_of(self._links).cut()

    @property
    def is_down(self) -> bool:
        return self.down_until > self.clock.now()

    def _of(self, link: ModelRedisConnection) -> Keyspace:
        if self.old is not None and self._old_until <= self.clock.now():
            self.old = None
            for other_link in self._links:
                other_link.reconnect()
        return self.old if self.old is not None and link.is_on_old_primary else self.primary

    def _fail(self) -> None:
        fault_source, faults, now = (
            self.fault_source,
            self.fault_source.service_rates.redis,
            self.clock.now(),
        )
        if fault_source.occurs("redis.down", faults.down_rate):
            self.down_until = max(self.down_until, now + fault_source.seconds(faults.down_s))
            self._cut_all()
        if fault_source.occurs("redis.failover", faults.failover_rate):
            self.primary.lose_last_writes(fault_source.seconds(faults.failover_lost_s))
            self._cut_all()
        if self.old is None and fault_source.occurs("redis.split", faults.split_rate):
            self.old, self._old_until = (
                self.primary.copy(),
                now + fault_source.seconds(faults.split_s),
            )
            for link in self._links:
                link.is_on_old_primary = fault_source.below(2) == 0
        if self.primary.values and fault_source.occurs("redis.evicted", faults.evicted_rate):
            self.primary.forget(fault_source.one_of(list(self.primary.values)))

    def _cut_all(self) -> None:
        for link in self._links:
            link.cut()


@dataclass(slots=True, eq=False)
class ModelRedisConnection:
    """Implements RedisConnection. `is_on_old_primary` means that it still talks to a deposed
    primary."""

    model: RedisModel
    is_on_old_primary: bool = False
    _subscriptions: list[tuple[str, trio.MemorySendChannel[str]]] = field(default_factory=list)

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[str | int]) -> Any:
        return await self.model.ask(self, lambda at: self.model.run(at, script, keys, args))

    async def get(self, key: str) -> str | None:
        value = await self.model.ask(self, lambda at: at.call("GET", key))
        return None if value is False else str(value)

    async def put(self, key: str, text: str, *, ttl_s: float) -> None:
        ms = str(int(ttl_s * 1000))
        await self.model.ask(self, lambda at: at.call("SET", key, text, "PX", ms))

    async def drop(self, key: str, members: Sequence[str]) -> None:
        await self.model.ask(self, lambda at: at.call("ZREM", key, *members))

    async def publish(self, channel: str, text: str) -> None:
        await self.model.ask(self, lambda at: self.model.publish(self, channel, text))

    @asynccontextmanager
    async def subscribe(
        self, channel: str
    ) -> AsyncGenerator[AsyncIterator[Mapping[str, Any]], None]:
        await self.model.ask(self, lambda at: None)
        send, receive = trio.open_memory_channel[str](UNREAD_MAX)
        self._subscriptions.append((channel, send))
        with send, receive:
            try:
                yield _messages(receive)
            finally:
                self._subscriptions = [
                    subscription
                    for subscription in self._subscriptions
                    if subscription[1] is not send
                ]

    def deliver(self, channel: str, text: str) -> None:
        for name, send in self._subscriptions:
            if name == channel:
                try:
                    send.send_nowait(text)
                except (trio.WouldBlock, trio.BrokenResourceError):
                    send.close()  # Redis disconnects subscribers that do not keep up.

    def cut(self) -> None:
        for _, send in self._subscriptions:
            send.close()
        self._subscriptions = []

    def reconnect(self) -> None:
        """Switches to the new primary, which ends the subscriptions at the old one."""
        if self.is_on_old_primary:
            self.is_on_old_primary = False
            self.cut()


async def _messages(receive: trio.MemoryReceiveChannel[str]) -> AsyncIterator[Mapping[str, Any]]:
    async for text in receive:
        yield {"data": text}
    raise _CUT()
