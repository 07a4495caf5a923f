"""Backends: one per engine. A backend opens the engine for simulated processes and reads its rows
for the checkers.

A backend outlives every process. `open` gives a process the ports of the engine, with its faults
injected; `take_snapshot` returns a snapshot of everything that is committed.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

import trio

from actors.tree import Mailboxes
from conveyor.engines.memory import memory_engine
from conveyor.engines.sql_mapping import Table
from conveyor.engines.sqlite import join_engine, open_engine
from conveyor.engines.sqlite.blobs import place_in
from conveyor.engines.sqlite.errors import is_busy
from conveyor.engines.sqlite.sql import TABLES
from conveyor.ports.blobs import Blobs
from conveyor.ports.clock import Clock
from conveyor.ports.coordinator import Coordinator
from conveyor.ports.queue import Queue
from conveyor.ports.store import Store
from conveyor.simulation.backends.snapshot import Address, Lease, Snapshot
from conveyor.simulation.backends.storage_dump import StoredItem, of_directory, of_memory
from conveyor.simulation.faults.fault_injector import FaultInjector
from conveyor.simulation.faults.faults import Faults
from conveyor.simulation.faults.power_cut import SyncLog
from conveyor.simulation.faults.skewed_clock import WallClock
from conveyor.simulation.virtual_executor import VirtualExecutor

if TYPE_CHECKING:
    from conveyor.bootstrap.aws import AwsRuntime

# Larger than any body: it only bounds one read.
_BODY_BYTES_MAX = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The ports of a process. `shared` is the AWS runtime, through which processes signal each
    other; other engines have none."""

    store: Store
    queue: Queue
    blobs: Blobs
    coordinator: Coordinator
    shared: AwsRuntime | None = None


class Backend(Protocol):
    """`is_one_machine`: one process owns the data and all share a clock. `rows_come_first`: a step
    of an ingest writes its rows before it counts them."""

    is_one_machine: bool
    rows_come_first: bool

    async def prepare(self) -> None:
        """Creates what the engine needs before the first process opens it."""

    def open(
        self, injector: FaultInjector, clock: Clock, random: Random, *, role: str, mail: Mailboxes
    ) -> AbstractAsyncContextManager[Ports]: ...

    def take_snapshot(self) -> Snapshot: ...

    def body(self, key: str) -> bytes | None: ...

    def bodies(self) -> Sequence[str]: ...

    def stored_items(self) -> Iterator[StoredItem]:
        """What the engine stores beside its rows: queues, messages, coordination entries and
        bodies."""

    def queue_depths(self) -> Mapping[str, int]:
        """The number of messages of each run, visible or not."""

    def lose_leases(self) -> bool:
        """Loses leases as a failover of the coordinator does; returns False if the engine cannot
        lose any."""

    def cut_power(self) -> bool:
        """Loses everything that was not synced to disk; returns False if the engine models no such
        loss."""

    def handle_presigned(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes
    ) -> int:
        """Answers a request to a presigned URL of the storage with its status."""

    def stop_faults(self) -> None:
        """Sets every fault rate of the engine's services to 0."""

    def fault_counts(self) -> Mapping[str, int]:
        """How often each fault of the engine's services occurred."""

    def close(self) -> None: ...


def wrap_ports(engine: Any, injector: FaultInjector) -> Ports:
    """Returns the ports of an engine with faults injected into each call."""
    return Ports(
        store=injector.with_faults(engine.store, "store"),
        queue=injector.with_faults(engine.queue, "queue"),
        blobs=injector.with_faults(engine.blobs, "blobs"),
        coordinator=injector.with_faults(engine.coordinator, "coordinator"),
    )


class BackendDefaults:
    """The methods of a backend without services: defaults that most backends share."""

    async def prepare(self) -> None:
        await trio.lowlevel.checkpoint()

    def handle_presigned(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes
    ) -> int:
        raise AssertionError("this backend has no presigned URLs")

    def cut_power(self) -> bool:
        return False

    def stop_faults(self) -> None:
        """Does nothing: the engine has no faults of its own."""

    def fault_counts(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        """Does nothing: no file or connection is open."""


class MemoryBackend(BackendDefaults):
    """One memory engine with its own clock, shared by all processes."""

    is_one_machine = False
    rows_come_first = False

    def __init__(self, random: Random) -> None:
        self._clock = WallClock()
        self._engine = memory_engine(clock=self._clock, random=random)

    @asynccontextmanager
    async def open(
        self, injector: FaultInjector, clock: Clock, random: Random, *, role: str, mail: Mailboxes
    ) -> AsyncGenerator[Ports, None]:
        await trio.lowlevel.checkpoint()
        yield wrap_ports(self._engine, injector)

    def take_snapshot(self) -> Snapshot:
        return Snapshot(
            at=trio.current_time(),
            now=self._clock.now(),
            rows={kind: dict(table) for kind, table in self._engine.store.rows().items()},
            leases=[Lease(*values) for values in self._engine.coordinator.leases()],
        )

    def lose_leases(self) -> bool:
        self._engine.coordinator.forget()
        return True

    def body(self, key: str) -> bytes | None:
        return self._engine.blobs.bodies().get(key)

    def bodies(self) -> Sequence[str]:
        return sorted(self._engine.blobs.bodies())

    def stored_items(self) -> Iterator[StoredItem]:
        return of_memory(self._engine)

    def queue_depths(self) -> Mapping[str, int]:
        return {run_id: len(refs) for run_id, refs in self._engine.queue.messages().items()}


def _no_rows() -> dict[type, dict[Address, Any]]:
    return {kind: {} for kind in TABLES}


@dataclass(slots=True)
class EmbeddedBackend(BackendDefaults):
    """One data directory. The first process owns it, the others join it."""

    data_dir: Path
    faults: Faults
    clock: WallClock
    random: Random
    has_power_cuts: bool = False
    is_one_machine: bool = True
    rows_come_first: bool = False
    _reader: sqlite3.Connection | None = None
    _tables: dict[type, dict[Address, Any]] = field(default_factory=_no_rows)
    _seen: int = 0
    _syncs: SyncLog | None = None

    def __post_init__(self) -> None:
        if self.has_power_cuts:
            self._syncs = SyncLog(str(self.data_dir / "blobs"))

    @asynccontextmanager
    async def open(
        self, injector: FaultInjector, clock: Clock, random: Random, *, role: str, mail: Mailboxes
    ) -> AsyncGenerator[Ports, None]:
        executor = VirtualExecutor(self.faults, random, self._syncs)
        if role == "helper":
            opening = join_engine(self.data_dir, clock=clock, random=random, executor=executor)
        else:
            opening = open_engine(
                self.data_dir, clock=clock, random=random, owner=role, executor=executor
            )
        async with opening as engine:
            yield wrap_ports(engine, injector)

    def take_snapshot(self) -> Snapshot:
        is_new = self._reader is None
        connection = self._connect()
        written = {} if connection is None else self._catch_up(connection)
        return Snapshot(
            at=trio.current_time(),
            now=self.clock.now(),
            rows=dict(self._tables),
            leases=self._leases(connection),
            written=None if is_new else written,
        )

    def body(self, key: str) -> bytes | None:
        place = place_in(str(self.data_dir / "blobs"), key)
        try:
            with open(place.path, "rb") as file:
                file.seek(place.offset)
                return file.read(min(place.size_bytes, _BODY_BYTES_MAX))
        except FileNotFoundError:
            return None

    def bodies(self) -> Sequence[str]:
        """The paths of all bodies; a path contains the job id, as a blob key does."""
        root = self.data_dir / "blobs"
        return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())

    def stored_items(self) -> Iterator[StoredItem]:
        return of_directory(self.data_dir, self._reader, self.clock.now())

    def queue_depths(self) -> Mapping[str, int]:
        sql = "SELECT run_id, count(*) FROM messages JOIN queues USING (queue_id) GROUP BY run_id"
        return {} if self._reader is None else dict(self._reader.execute(sql).fetchall())

    def cut_power(self) -> bool:
        if self._syncs is None or not (self.data_dir / "blobs").is_dir():
            return False
        self._syncs.lose_unsynced()
        return True

    def lose_leases(self) -> bool:
        return False  # Leases are rows of the database, which loses nothing.

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def _connect(self) -> sqlite3.Connection | None:
        path = self.data_dir / "conveyor.db"
        if self._reader is None and path.exists():
            connection = sqlite3.connect(path, isolation_level=None, timeout=0)
            if not _log_changes(connection):
                connection.close()
                return None
            connection.execute("PRAGMA query_only = ON")
            self._reader = connection
            for kind, table in TABLES.items():
                self._tables[kind] = _all_rows(connection, table)
        return self._reader

    def _catch_up(self, connection: sqlite3.Connection) -> dict[type, list[Address]]:
        """Reads the rows that changed since the last call. A table without changes stays the same
        object, so that comparing snapshots can skip it."""
        written = {}
        sql = "SELECT number, kind, address FROM watched WHERE number > ?"
        changed: dict[str, dict[str, None]] = {}
        for number, kind, address in connection.execute(sql, (self._seen,)):
            changed.setdefault(kind, {})[address] = None
            self._seen = number
        for kind, table in TABLES.items():
            if table.name in changed:
                rows = dict(self._tables[kind])
                written[kind] = [tuple(json.loads(text)) for text in changed[table.name]]
                for address in written[kind]:
                    _refresh(connection, table, rows, address)
                self._tables[kind] = rows
        return written

    def _leases(self, connection: sqlite3.Connection | None) -> list[Lease]:
        sql = "SELECT job_id, run_id, expires_at FROM leases WHERE expires_at > ?"
        if connection is None:
            return []
        return [Lease(*row) for row in connection.execute(sql, (self.clock.now(),))]


def _log_changes(connection: sqlite3.Connection) -> bool:
    """Installs triggers that record which rows change, because reading all rows after each write is
    slow. Returns False while another connection creates the tables or writes."""
    script = ["CREATE TABLE IF NOT EXISTS watched (number INTEGER PRIMARY KEY, kind, address)"]
    for table in TABLES.values():
        for event, row in (("INSERT", "NEW"), ("UPDATE", "NEW"), ("DELETE", "OLD")):
            key = ", ".join(f'{row}."{name}"' for name in table.key_columns)
            script.append(
                f"CREATE TRIGGER IF NOT EXISTS watch_{table.name}_{event} AFTER {event} "
                f"ON {table.name} BEGIN INSERT INTO watched (kind, address) "
                f"VALUES ('{table.name}', json_array({key})); END"
            )
    try:
        connection.execute("BEGIN IMMEDIATE")
        for statement in script:
            connection.execute(statement)
        connection.execute("COMMIT")
    except sqlite3.OperationalError as error:
        if is_busy(error) or "no such table" in str(error):
            return False
        raise
    return True


def _all_rows(connection: sqlite3.Connection, table: Table) -> dict[Address, Any]:
    columns = ", ".join(f'"{name}"' for name in table.columns)
    rows = map(table.from_row, connection.execute(f"SELECT {columns} FROM {table.name}"))
    return {table.key_values(row): row for row in rows}


def _refresh(
    connection: sqlite3.Connection, table: Table, rows: dict[Address, Any], address: Address
) -> None:
    columns = ", ".join(f'"{name}"' for name in table.columns)
    where = " AND ".join(f'"{name}" = ?' for name in table.key_columns)
    sql = f"SELECT {columns} FROM {table.name} WHERE {where}"
    raw = connection.execute(sql, address).fetchone()
    if raw is None:
        rows.pop(address, None)
    else:
        rows[address] = table.from_row(raw)
