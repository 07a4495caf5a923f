"""The Postgres engine over a model of the server. Its store, queue, coordinator and pool are the
real ones; bodies are in memory.

Faults of the server happen to calls of a connection, below the engine. Faults of a process happen
to calls of its ports, as on other engines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

from actors.tree import Mailboxes
from conveyor.engines.memory import memory_engine
from conveyor.engines.postgres.coordinator import PostgresCoordinator
from conveyor.engines.postgres.database import DatabaseConfig, open_database
from conveyor.engines.postgres.queue import PostgresQueue
from conveyor.engines.postgres.sql import TABLES
from conveyor.engines.postgres.store import PostgresStore
from conveyor.ports.clock import Clock
from conveyor.simulation.backends.backends import BackendDefaults, Ports, wrap_ports
from conveyor.simulation.backends.snapshot import Address, Lease, Snapshot
from conveyor.simulation.backends.storage_dump import (
    BODY,
    MARK,
    MESSAGE,
    QUEUE,
    StoredItem,
)
from conveyor.simulation.faults.fault_injector import FaultInjector
from conveyor.simulation.faults.skewed_clock import WallClock
from conveyor.simulation.models.postgres.server import (
    CALM,
    UNLOGGED,
    Faults,
    ModelConnection,
    Row,
    Server,
)
from conveyor.simulation.models.postgres.statements import execute
from conveyor.simulation.options import Options

# Few connections, so that calls also wait for one.
_CONFIG = DatabaseConfig(url="postgresql://model", connections_max=4)


def _draw_faults(random: Random) -> Faults:
    """Draws the fault rates of this world's server. Half of them are 0."""

    def rate(most: float) -> float:
        return random.choice((0.0, 0.0, most / 4, most))

    return Faults(
        cut=rate(0.02),
        lost_commit=rate(0.02),
        serialization=rate(0.05),
        deadlock=rate(0.05),
        statement_timeout=rate(0.01),
        crash=rate(0.002),
    )


class PostgresBackend(BackendDefaults):
    """One server with its own clock, shared by all processes."""

    is_one_machine = False
    rows_come_first = False

    def __init__(self, options: Options, random: Random) -> None:
        self._clock = WallClock()
        self._blobs = memory_engine(clock=self._clock, random=random).blobs
        is_quiet = options.is_fault_free or options.conditions.is_isolated
        self.server = Server(
            execute,
            random,
            faults=CALM if is_quiet else _draw_faults(random),
            latency_s=random.choice((0.0, 0.001, 0.02)),
        )
        self._decoded: dict[tuple[type, Address], tuple[Row, Any]] = {}

    @asynccontextmanager
    async def open(
        self, injector: FaultInjector, clock: Clock, random: Random, *, role: str, mail: Mailboxes
    ) -> AsyncGenerator[Ports, None]:
        async def connect() -> Any:
            injector.check()
            return ModelConnection(self.server, lambda: not injector.is_dead)

        instant = self._clock.now
        async with open_database(_CONFIG, connect=connect) as database:
            yield wrap_ports(
                Ports(
                    store=PostgresStore(database, instant),
                    queue=PostgresQueue(database, instant),
                    blobs=self._blobs,
                    coordinator=PostgresCoordinator(database, random, instant),
                ),
                injector,
            )

    def take_snapshot(self) -> Snapshot:
        return Snapshot(
            at=self._clock.steady(),
            now=self._clock.now(),
            rows={kind: self._rows(kind) for kind in TABLES},
            leases=[
                Lease(row["pool"], row["run_id"], row["expires_at"])
                for row in self._table("leases").values()
                if row["run_id"] and row["expires_at"] > self._clock.now()
            ],
        )

    def _table(self, name: str) -> Mapping[tuple[Any, ...], Row]:
        return self.server.tables.get(name, {})

    def _rows(self, kind: type) -> dict[Address, Any]:
        """The committed rows of one kind. A row that has not changed is not decoded again."""
        table = TABLES[kind]
        rows = {}
        for key, row in self._table(table.name).items():
            known = self._decoded.get((kind, key))
            if known is None or known[0] is not row:
                decoded = table.from_row([row[name] for name in table.columns])
                known = self._decoded[kind, key] = row, decoded
            rows[key] = known[1]
        return rows

    def lose_leases(self) -> bool:
        for table in UNLOGGED:
            self.server.tables.pop(table, None)
        return True

    def stop_faults(self) -> None:
        self.server.faults = CALM

    def fault_counts(self) -> Mapping[str, int]:
        return {f"postgres {name}": count for name, count in self.server.fault_counts.items()}

    def body(self, key: str) -> bytes | None:
        return self._blobs.bodies().get(key)

    def bodies(self) -> Sequence[str]:
        return sorted(self._blobs.bodies())

    def stored_items(self) -> Iterator[StoredItem]:
        queues = {row["queue_id"]: row["run_id"] for row in self._table("queues").values()}
        for run_id in queues.values():
            if run_id is not None:
                yield StoredItem(QUEUE, run_id)
        for row in self._table("messages").values():
            run_id = queues.get(row["queue_id"]) or "none"
            yield StoredItem(MESSAGE, run_id, repr(row).encode())
        for row in self._table("status_reports").values():
            if row["expires_at"] > self._clock.now():
                yield StoredItem(MARK, row["subject"], row["text"].encode())
        for key, body in self._blobs.bodies().items():
            yield StoredItem(BODY, key, body)

    def queue_depths(self) -> Mapping[str, int]:
        queues = {row["queue_id"]: row["run_id"] for row in self._table("queues").values()}
        runs = (queues.get(row["queue_id"]) for row in self._table("messages").values())
        return Counter(run_id for run_id in runs if run_id is not None)
