"""DynamoCoordinator: keeps leases as slot rows, for deployments without Redis
(docs/engines.md, Leases in DynamoDB).

A pool of `cap` leases has the slots 0 to cap - 1. A worker acquires a slot with a conditional
write, so only one of two workers gets it. The alternative, a counter per pool, would be one row
that all workers write, and a crashed worker would leave it too high. Instants are by the time of
DynamoDB, which workers know from its responses (service_clock.py). They know it only roughly, so a
slot counts as free only `SKEW_S` after its end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from conveyor.domain import limits
from conveyor.domain.ids import JobId, LeaseId, Random, RunId
from conveyor.domain.timing import is_unreal as is_ahead
from conveyor.engines.aws.client.client import AwsClient
from conveyor.engines.aws.errors import AwsError
from conveyor.engines.aws.gather import gather
from conveyor.ports.clock import Clock
from conveyor.ports.coordinator import HostPool

# The assumed difference between two workers' clocks. With a larger difference two workers may hold
# one slot for a moment; a larger value keeps the slots of crashed workers longer.
SKEW_S = 5.0
# How often `_take` searches again for slots that other workers did not take first.
ROUNDS_MAX = 20

_REFUSED = "ConditionalCheckFailedException"
# More than the time between the start of a call and its effect, including all attempts.
_LATE_S = 120.0
# Interrupted gateway calls keep their leases and status report until the gateway has ended them.
_TTL_S_MAX = max(limits.LEASE_TTL_S, limits.STATUS_TTL_S, limits.SCRAPE_DEADLINE_S)
_DAY_S = 24 * 3600.0
_HOUR_S = 3600.0
_INTRODUCED_MAX = 10_000  # Bounds the memory. A forgotten run costs one more write.

Item = dict[str, dict[str, str]]


class _Slot(msgspec.Struct, frozen=True):
    """The row of a lease. The lease id contains all of it, so the holder keeps nothing else."""

    pool: str
    number: int
    token: str

    @property
    def lease_id(self) -> LeaseId:
        return LeaseId(f"{self.pool}#{self.number}#{self.token}")

    @property
    def key(self) -> Item:
        return _key(f"Sem#{self.pool}", f"{self.number:05d}")


class DynamoCoordinator:
    def __init__(
        self, client: AwsClient, table: str, *, clock: Clock, random: Random, skew_s: float = SKEW_S
    ) -> None:
        self._client = client
        self._table = table
        self._clock = clock
        self._random = random
        self._skew_s = skew_s
        self._introduced: dict[RunId, float] = {}

    async def acquire(
        self, job_id: JobId, run_id: RunId, *, count_max: int, cap: int, ttl_s: float
    ) -> list[LeaseId]:
        await self._introduce(job_id, run_id)
        return await self._take(job_id, run_id, count_max=count_max, cap=cap, ttl_s=ttl_s)

    async def _take(
        self, pool: str, run_id: str, *, count_max: int, cap: int, ttl_s: float
    ) -> list[LeaseId]:
        """Acquires slots. For slots that other workers took meanwhile, it tries other free ones."""
        taken: list[LeaseId] = []
        for _ in range(ROUNDS_MAX):
            live = {int(row["sk"]["S"]) for row in await self._live(f"Sem#{pool}", self._skew_s)}
            free = [number for number in range(cap) if number not in live]
            count = min(count_max - len(taken), cap - len(live), len(free))
            if count <= 0:
                break
            # A random start: workers that search at the same time would all try the same slots.
            first = self._random.getrandbits(32) % len(free)
            slots = [
                _Slot(pool, number, f"{self._random.getrandbits(96):024x}")
                for number in (free[first:] + free[:first])[:count]
            ]
            got = await gather(lambda slot: self._put(slot, run_id, ttl_s), slots)
            taken += [slot.lease_id for slot, is_ours in zip(slots, got, strict=True) if is_ours]
            if all(got):  # Either that is enough, or the pool is full now.
                break
        return taken

    async def _put(self, slot: _Slot, run_id: str, ttl_s: float) -> bool:
        now = self._clock.now()
        item = {"token": {"S": slot.token}, "run_id": {"S": run_id}, **_life(now + ttl_s)}
        return await self._write(
            "PutItem",
            Item=slot.key | item,
            ConditionExpression=(
                "attribute_not_exists(pk) OR expires_at <= :dead OR expires_at > :unreal"
            ),
            ExpressionAttributeValues={
                ":dead": _number(now - self._skew_s),
                ":unreal": _number(_latest_end(now)),
            },
        )

    async def acquire_hosts(
        self, pools: Sequence[HostPool], *, ttl_s: float
    ) -> list[LeaseId | None]:
        by_name: dict[str, list[int]] = defaultdict(list)
        for index, pool in enumerate(pools):
            by_name[pool.name].append(index)
        leases: list[LeaseId | None] = [None] * len(pools)

        async def enter(indexes: Sequence[int]) -> None:
            # Neighbours with the same limits together: one search finds the room for all of them.
            for pool, group in groupby(indexes, key=pools.__getitem__):
                members = list(group)
                taken = await self._enter(pool, len(members), ttl_s)
                for index, lease_id in zip(members, taken, strict=False):
                    leases[index] = lease_id

        await gather(enter, list(by_name.values()))
        return leases

    async def _enter(self, pool: HostPool, count: int, ttl_s: float) -> list[LeaseId]:
        if not pool.spacing_s:
            return await self._take(pool.name, "", count_max=count, cap=pool.cap, ttl_s=ttl_s)
        leases: list[LeaseId] = []
        while len(leases) < count:
            lease_id = await self._enter_spaced(pool, ttl_s)
            if lease_id is None:
                break
            leases.append(lease_id)
        return leases

    async def _enter_spaced(self, pool: HostPool, ttl_s: float) -> LeaseId | None:
        now, clock = self._clock.now(), _key(f"Door#{pool.name}", "next")
        row = await self._get(clock)
        seen_at = 0.0 if row is None else float(row["expires_at"]["N"])
        # A worker sets this at most one spacing ahead. A later instant means that the clock of its
        # writer was ahead.
        is_unreal = is_ahead(seen_at, now=now, ttl_s=pool.spacing_s + limits.HOST_SLACK_S)
        next_at = now if is_unreal else seen_at
        if now < next_at - limits.HOST_SLACK_S:
            return None
        taken = await self._take(pool.name, "", count_max=1, cap=pool.cap, ttl_s=ttl_s)
        if not taken:
            return None
        # The lease first, then the spacing: a lease can be released again if another worker has
        # used the spacing, but a used spacing cannot be returned.
        was_next = await self._write(
            "PutItem",
            Item=clock | _life(max(next_at, now) + pool.spacing_s),
            ConditionExpression="attribute_not_exists(pk) OR expires_at = :seen",
            ExpressionAttributeValues={":seen": _number(seen_at)},
        )
        if not was_next:
            await self.release(taken)
        return taken[0] if was_next else None

    async def renew(self, lease_ids: Sequence[LeaseId], *, ttl_s: float) -> frozenset[LeaseId]:
        slots = _slots(lease_ids)
        extensions = await gather(lambda slot: self._extend(slot, ttl_s), slots)
        live = {slot.lease_id for slot, is_kept in zip(slots, extensions, strict=True) if is_kept}
        return frozenset(lease_ids) - live

    async def _extend(self, slot: _Slot, ttl_s: float) -> bool:
        """Renews a lease, but never to an earlier end.

        A renewal may arrive late, or its clock may have been set back a little. An earlier end
        would give the slot to another worker while its holder still works (seed 3181). Only an end
        that is further ahead than any lease lives is moved back, because other workers count such a
        slot as free.
        """
        now = self._clock.now()
        life = _life(now + ttl_s)
        is_longer = await self._write(
            "UpdateItem",
            Key=slot.key,
            UpdateExpression="SET expires_at = :expires_at, #ttl = :ttl",
            ConditionExpression=(
                "#token = :token AND expires_at > :now"
                " AND (expires_at <= :expires_at OR expires_at > :unreal)"
            ),
            ExpressionAttributeNames={"#ttl": "ttl", "#token": "token"},
            ExpressionAttributeValues={
                ":expires_at": life["expires_at"],
                ":ttl": life["ttl"],
                ":token": {"S": slot.token},
                ":now": _number(now),
                ":unreal": _number(_latest_end(now)),
            },
        )
        # The write is also refused if the stored end is later already. The lease is held then.
        return is_longer or await self._is_held(slot, now)

    async def _is_held(self, slot: _Slot, now: float) -> bool:
        row = await self._get(slot.key)
        if row is None or row["token"]["S"] != slot.token:
            return False
        return float(row["expires_at"]["N"]) > now

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        await gather(self._drop, _slots(lease_ids))

    async def _drop(self, slot: _Slot) -> bool:
        # The token is compared: the slot may belong to another worker by now.
        return await self._write(
            "DeleteItem",
            Key=slot.key,
            ConditionExpression="#token = :token",
            ExpressionAttributeNames={"#token": "token"},
            ExpressionAttributeValues={":token": {"S": slot.token}},
        )

    async def count(self, run_id: RunId) -> int:
        row = await self._get(_key(f"Sem#{run_id}", "job"))
        if row is None:
            return 0
        live = await self._live(f"Sem#{row['job_id']['S']}")
        return sum(slot["run_id"]["S"] == run_id for slot in live)

    async def put_status(self, owner: str, marks: Mapping[str, str], *, ttl_s: float) -> None:
        async def leave(subject: str) -> bool:
            # A row that ends now would still count as live on workers whose clocks are behind.
            if ttl_s <= 0:
                return await self._write("DeleteItem", Key=_key(f"Mark#{subject}", owner))
            item = {"text": {"S": marks[subject]}, **_life(self._clock.now() + ttl_s)}
            return await self._write("PutItem", Item=_key(f"Mark#{subject}", owner) | item)

        await gather(leave, list(marks))

    async def list_status(self, subject: str) -> list[str]:
        return [row["text"]["S"] for row in await self._live(f"Mark#{subject}")]

    async def _introduce(self, job_id: JobId, run_id: RunId) -> None:
        """Stores the job of a run, because `count` knows only the run."""
        now = self._clock.now()
        if now - self._introduced.get(run_id, 0.0) < _HOUR_S:
            return
        item = {"job_id": {"S": job_id}, **_life(now + _DAY_S)}
        await self._write("PutItem", Item=_key(f"Sem#{run_id}", "job") | item)
        if len(self._introduced) >= _INTRODUCED_MAX:
            self._introduced.clear()
        self._introduced[run_id] = now

    async def _live(self, partition: str, skew_s: float = 0.0) -> list[Item]:
        """Returns the live rows of a partition, in the order of their keys."""
        now = self._clock.now()
        params: dict[str, Any] = {
            "TableName": self._table,
            "ConsistentRead": True,
            "KeyConditionExpression": "pk = :pk",
            "FilterExpression": "expires_at > :dead AND expires_at <= :unreal",
            "ExpressionAttributeValues": {
                ":pk": {"S": partition},
                ":dead": _number(now - skew_s),
                ":unreal": _number(_latest_end(now)),
            },
        }
        rows: list[Item] = []
        while True:
            page = await self._client.call("dynamodb", "Query", params)
            rows += page.get("Items", ())
            if not page.get("LastEvaluatedKey"):
                return rows
            params["ExclusiveStartKey"] = page["LastEvaluatedKey"]

    async def _get(self, key: Item) -> Item | None:
        params = {"TableName": self._table, "Key": key, "ConsistentRead": True}
        row: Item | None = (await self._client.call("dynamodb", "GetItem", params)).get("Item")
        return row

    async def _write(self, operation: str, **params: Any) -> bool:
        """Writes, and returns whether the condition held."""
        try:
            await self._client.call("dynamodb", operation, {"TableName": self._table, **params})
        except AwsError as error:
            if error.code != _REFUSED:
                raise
            return False
        return True


def _slots(lease_ids: Sequence[LeaseId]) -> list[_Slot]:
    parts = [lease_id.rsplit("#", 2) for lease_id in dict.fromkeys(lease_ids)]
    return [_Slot(part[0], int(part[1]), part[2]) for part in parts if len(part) == 3]


def _key(partition: str, sort: str) -> Item:
    return {"pk": {"S": partition}, "sk": {"S": sort}}


def _latest_end(now: float) -> float:
    """Returns the latest possible end of a lease or status report that a correct clock wrote.

    A row with a later end was written by a clock that was ahead, and counts as ended. A renewal may
    arrive late, so `now` may be `_LATE_S` old when the condition is checked.
    """
    return now + _TTL_S_MAX + _LATE_S + limits.CLOCK_SKEW_S


def _life(until: float) -> Item:
    """Returns the end of a row, and when DynamoDB may remove it."""
    return {"expires_at": _number(until), "ttl": _number(int(until + _HOUR_S))}


def _number(value: float) -> dict[str, str]:
    return {"N": repr(value)}
