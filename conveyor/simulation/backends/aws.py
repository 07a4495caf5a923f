"""The AWS engine over models of DynamoDB, SQS, S3 and Redis.

Faults of calls come from the models, below the retries of the engine. The fault injector of a
process adds only what happens to the process: its end, pauses and outages.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, cast

import trio

from actors.tree import LocalSignals, Mailboxes
from conveyor.bootstrap.aws import open_on
from conveyor.domain import ids
from conveyor.domain.changes import KIND_OF_KEY, ROW_KINDS
from conveyor.engines.aws.client.client import RetryingAwsClient
from conveyor.engines.aws.client.service_clock import ServiceClock
from conveyor.engines.aws.client.usage import Meter
from conveyor.engines.aws.dynamodb.items import codec_of
from conveyor.engines.aws.dynamodb.keys import TARGET
from conveyor.engines.aws.engine import Names, build_engine, check_resources
from conveyor.engines.aws.errors import NoResponse
from conveyor.engines.aws.packs import Packing
from conveyor.engines.packed_key import part_of
from conveyor.ports.clock import Clock
from conveyor.simulation.backends.backends import Ports
from conveyor.simulation.backends.faulty_aws import FaultyRedis, FaultyTransport
from conveyor.simulation.backends.snapshot import Address, Lease, Snapshot
from conveyor.simulation.backends.storage_dump import BODY, MARK, MESSAGE, QUEUE, StoredItem
from conveyor.simulation.faults.fault_injector import FaultInjector
from conveyor.simulation.faults.faults import Faults
from conveyor.simulation.faults.skewed_clock import WallClock
from conveyor.simulation.models.aws import AwsModel
from conveyor.simulation.models.dynamodb.values import Item
from conveyor.simulation.models.fault_rates import CALM
from conveyor.simulation.models.fault_source import FaultSource
from conveyor.simulation.models.redis.model import RedisModel
from conveyor.simulation.options import Options
from conveyor.simulation.process import settings_of

NAMES = Names(table="simulated", bucket="simulated", queue_prefix="simulated-")
REGION = "eu-west-1"

# A world has few task slots. With the packing of a real deployment most packs would hold one body.
_PACKING = Packing(waiting_max=20)
_POOL = re.compile(r"\{(.+)\}/(.*):leases$")
_KINDS: dict[str, type] = {kind.name: kind.key_type for kind in ROW_KINDS}


def _no_rows() -> dict[type, dict[Address, Any]]:
    return {kind.key_type: {} for kind in ROW_KINDS}


@dataclass(slots=True)
class AwsBackend:
    """The AWS services of one account, and Redis if the options have it."""

    options: Options
    faults: Faults
    random: Random
    is_one_machine: bool = False
    rows_come_first: bool = True
    clock: WallClock = field(default_factory=WallClock)
    model: AwsModel = field(init=False)
    redis: RedisModel | None = None
    _tables: dict[type, dict[Address, Any]] = field(default_factory=_no_rows)
    _places: dict[tuple[str, str], Address] = field(default_factory=dict)
    _leases: dict[tuple[str, str], Lease] = field(default_factory=dict)
    _restored: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        fault_source = FaultSource(random=self.random)
        self.model = AwsModel(clock=self.clock, fault_source=fault_source)
        if self.options.has_redis:
            self.redis = RedisModel(clock=self.clock, fault_source=fault_source)

    async def prepare(self) -> None:
        client = RetryingAwsClient(transport=self.model, random=self.random)
        await check_resources(client, NAMES, region=REGION)
        self.model.fault_source.service_rates = self.options.service_rates

    @asynccontextmanager
    async def open(
        self, injector: FaultInjector, clock: Clock, random: Random, *, role: str, mail: Mailboxes
    ) -> AsyncGenerator[Ports, None]:
        """Yields the ports of one process: the real AWS runtime, whose transport and Redis
        connection pass the fault injector."""
        injector.has_call_faults = False
        injector.refusal = partial(NoResponse, was_sent=False)
        service_clock = ServiceClock(clock)
        transport = FaultyTransport(self.model, injector, service_clock)
        client = RetryingAwsClient(transport=transport, random=random, meter=Meter())
        engine = await build_engine(
            client,
            self.model,
            NAMES,
            clock=clock,
            random=random,
            service_clock=service_clock,
            packing=_PACKING,
        )
        link = (
            None if self.redis is None else FaultyRedis(self.redis.link(), injector, self._restored)
        )
        async with open_on(
            settings_of(self.options),
            engine,
            link,
            random=random,
            owner=ids.mint_ulid(clock.now(), random),
            local=LocalSignals(mail.discovery.address, mail.streamer.address),
        ) as shared:
            yield Ports(
                store=injector.with_trace(shared.store, "store"),
                queue=injector.with_trace(shared.queue, "queue"),
                blobs=injector.with_trace(shared.blobs, "blobs"),
                coordinator=injector.with_trace(shared.coordinator, "coordinator"),
                shared=shared,
            )

    def take_snapshot(self) -> Snapshot:
        now, written = self.clock.now(), self._catch_up()
        leases = [lease for lease in self._leases.values() if lease.expires_at > now]
        return Snapshot(
            at=trio.current_time(),
            now=now,
            rows=dict(self._tables),
            leases=[*leases, *self._leases_in_redis(now)],
            written=written,
        )

    def _leases_in_redis(self, now: float) -> Iterator[Lease]:
        values = {} if self.redis is None else self.redis.primary.values
        for key, scores in values.items():
            if (named := _POOL.search(key)) is None or isinstance(scores, str):
                continue
            pool = "/".join(filter(None, named.groups()))
            for member, until_us in scores.items():
                if (until := until_us / 1e6) > now:
                    run_id = member.partition("/")[0]
                    yield Lease(pool, run_id, until, is_capped=key not in self._restored)

    def _catch_up(self) -> dict[type, list[Address]]:
        """Decodes the items that were written since the last call. A table without writes stays the
        same object, so that comparing snapshots can skip it."""
        written: dict[type, list[Address]] = {}
        table = self.model.dynamodb.tables.get(NAMES.table)
        if table is None:
            return written
        for place in table.written:
            row = table.get(place)
            item = None if row is None else row.item
            if place[0].startswith("Sem#"):
                self._note_lease(place, item)
            elif (kind := _KINDS.get(place[1].partition("#")[0])) is not None:
                if kind not in written:
                    self._tables[kind] = dict(self._tables[kind])
                if (address := self._decode(kind, place, item)) is not None:
                    written.setdefault(kind, []).append(address)
        table.written.clear()
        return written

    def _note_lease(self, place: tuple[str, str], item: Item | None) -> None:
        if item is None or "token" not in item:
            self._leases.pop(place, None)
        else:
            pool, run_id = place[0].removeprefix("Sem#"), item.get("run_id", {"S": ""})["S"]
            name = f"{pool}#{int(place[1])}#{item['token']['S']}"
            self._leases[place] = Lease(pool, run_id, float(item["expires_at"]["N"]), name)

    def _decode(self, kind: type, place: tuple[str, str], item: Item | None) -> Address | None:
        """The address of the row that was written or removed; None for an item that is no row."""
        if item is None:
            address = self._places.pop(place, None)
            if address is not None:
                del self._tables[kind][address]
            return address
        if TARGET in item:
            return None
        row = codec_of(KIND_OF_KEY[kind].row_type).from_item(cast("Any", item))
        address = tuple(getattr(row, name) for name in KIND_OF_KEY[kind].key_fields)
        self._places[place] = address
        self._tables[kind][address] = row
        return address

    def body(self, key: str) -> bytes | None:
        """The stored body; the body of a pack member is a part of the pack."""
        part = part_of(key)
        name = key if part is None else part.pack_key
        stored = self.model.s3.buckets[NAMES.bucket].objects.get(name)
        if stored is None or part is None:
            return None if stored is None else stored.body
        return stored.body[part.offset : part.offset + part.size_bytes]

    def bodies(self) -> Sequence[str]:
        return sorted(self.model.s3.buckets[NAMES.bucket].objects)

    def stored_items(self) -> Iterator[StoredItem]:
        for url, queue in self.model.sqs.queues.items():
            name = _run_of(url)
            yield StoredItem(QUEUE, name)
            for message in queue.messages.values():
                yield StoredItem(MESSAGE, name, message.body.encode())
        for key, stored in self.model.s3.buckets[NAMES.bucket].objects.items():
            yield StoredItem(BODY, key, stored.body + repr(stored.metadata).encode())
        yield from self._items_that_are_no_rows()
        yield from self._kept_in_redis()

    def queue_depths(self) -> Mapping[str, int]:
        queues = self.model.sqs.queues.items()
        return {_run_of(url): len(queue.messages) for url, queue in queues}

    def _items_that_are_no_rows(self) -> Iterator[StoredItem]:
        """Items that are no rows, such as leases. Expired ones, which the table has not removed
        yet, are left out."""
        now = self.clock.now()
        for pk, partition in self.model.dynamodb.tables[NAMES.table].partitions.items():
            for (sk, *_), row in partition.rows.items():
                until = float(row.item.get("expires_at", {"N": "inf"}).get("N", "inf"))
                if sk.partition("#")[0] not in _KINDS and until > now:
                    yield StoredItem(MARK, f"{pk} {sk}", repr(row.item).encode())

    def _kept_in_redis(self) -> Iterator[StoredItem]:
        if self.redis is None:
            return
        space = self.redis.primary
        for key, value in space.values.items():
            if space.expires_at.get(key, math.inf) > self.clock.now():
                yield StoredItem(MARK, key, repr(value).encode())

    def lose_leases(self) -> bool:
        if self.redis is None:
            return False
        self.redis.primary.lose_last_writes(10.0)
        return True

    def cut_power(self) -> bool:
        return False

    def handle_presigned(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes
    ) -> int:
        return self.model.s3.handle(method, url, headers, body)[0]

    def stop_faults(self) -> None:
        self.model.fault_source.service_rates = CALM
        if self.redis is not None:
            self.redis.down_until = 0.0

    def fault_counts(self) -> Mapping[str, int]:
        return dict(self.model.fault_source.fault_counts)

    def close(self) -> None:
        """Does nothing: no file or connection is open."""


def _run_of(url: str) -> str:
    """The run id, or the purpose, that the name of a queue contains."""
    return url.rpartition("/")[2].removeprefix(NAMES.queue_prefix)
