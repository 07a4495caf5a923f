"""The AWS engine with a separate store for tasks: two stores in one world.

The task store is the memory engine, as a model of a transactional server: each call is applied as a
whole or not at all. It fails independently of the other store, so a process can lose one of them,
or die between the two writes of a change.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from actors.tree import Mailboxes
from conveyor.bootstrap.two_stores import split
from conveyor.domain.changes import EventKey, FeedKey, StatsKey, TaskKey
from conveyor.engines.memory import MemoryEngine, memory_engine
from conveyor.ports.clock import Clock
from conveyor.simulation.backends.aws import AwsBackend
from conveyor.simulation.backends.backends import Ports
from conveyor.simulation.backends.snapshot import Address, Snapshot
from conveyor.simulation.faults.fault_injector import FaultInjector

_KINDS = (TaskKey, StatsKey, EventKey, FeedKey)


@dataclass(slots=True)
class MixedBackend(AwsBackend):
    """An AwsBackend whose task rows are in the second store."""

    rows_come_first: bool = False
    _server: MemoryEngine = field(init=False)
    _tables_before: dict[type, dict[Address, Any]] = field(init=False)

    def __post_init__(self) -> None:
        AwsBackend.__post_init__(self)
        self._server = memory_engine(clock=self.clock, random=self.random)
        self._tables_before = {kind: {} for kind in _KINDS}

    @asynccontextmanager
    async def open(
        self, injector: FaultInjector, clock: Clock, random: Random, *, role: str, mail: Mailboxes
    ) -> AsyncGenerator[Ports, None]:
        async with AwsBackend.open(self, injector, clock, random, role=role, mail=mail) as ports:
            assert ports.shared is not None
            tasks = injector.with_faults(self._server.store, "tasks", has_call_faults=True)
            shared = split(ports.shared, tasks, clock=clock, random=random)
            yield replace(ports, store=injector.with_trace(shared.store, "store"), shared=shared)

    def take_snapshot(self) -> Snapshot:
        snapshot = AwsBackend.take_snapshot(self)
        written = dict(snapshot.written or {})
        for kind in _KINDS:
            before, table = self._tables_before[kind], dict(self._server.store.rows()[kind])
            places = [place for place, row in table.items() if before.get(place) is not row]
            places += [place for place in before if place not in table]
            if places:
                written[kind] = places
                self._tables_before[kind] = table
        return replace(snapshot, rows={**snapshot.rows, **self._tables_before}, written=written)
