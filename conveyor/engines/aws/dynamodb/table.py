"""Table: the operations of DynamoDB, each repeated until nothing is left unprocessed
(docs/engines.md, DynamoDB store)."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import trio

from conveyor.domain.changes import AnyKey
from conveyor.domain.errors import ConveyorError
from conveyor.domain.ids import Random
from conveyor.domain.model import Task
from conveyor.engines.aws.client.client import ATTEMPTS_MAX, AwsClient, backoff_s
from conveyor.engines.aws.client.usage import Meter
from conveyor.engines.aws.dynamodb.items import Item, Params, codec_for, key_item
from conveyor.engines.aws.dynamodb.keys import INDEXES, PK, SK, TTL, Place, item_key
from conveyor.engines.aws.errors import AwsError, is_refused_for_now, raise_translated
from conveyor.engines.aws.gather import gather, gather_results, slices, unwrap_all
from conveyor.ports.errors import QueueGone, Unavailable
from conveyor.ports.store import DamageLog

# Adaptive concurrency: how many rows are sent to a shard at once.
#
# A partition accepts a limited number of writes a second. DynamoDB does not publish the current
# number, and it changes over time. So each shard has a width of its own: WIDTH_STEP more after
# every successful wave, half as many after a throttled one. A wave is sent in batches, and
# throttled rows are written again with the next wave. No shard waits for another shard.


# DynamoDB's limits of BatchGetItem, of BatchWriteItem and BatchExecuteStatement, and of
# TransactWriteItems.
READ_MAX = 100
WRITTEN_MAX = 25
ATOMIC_MAX = 100

# In rows. A cold partition accepts 1,000 a second. A smaller start takes longer to grow, a larger
# one is throttled sooner. The largest width is about that of one ingest step.
WIDTH, WIDTH_STEP, WIDTH_MAX = 100, WRITTEN_MAX, 800
# Bounds the memory. A forgotten shard starts with WIDTH again.
_REMEMBERED_MAX = 1024
# Consecutive waves without one success before the call fails. A throttle passes, so it is tried
# more often than a lost answer, which usually took a timeout.
_THROTTLED_MAX, _LOST_MAX = 10, 3

Shard = Hashable
W = TypeVar("W")
Write = Callable[[Sequence[W]], Awaitable[list[W]]]
"""Sends one batch and returns the rows of it that were throttled. It must be safe to repeat."""


@dataclass(slots=True)
class AdaptiveConcurrency:
    """The width of each shard that was used lately."""

    _widths: OrderedDict[Shard, int] = field(default_factory=OrderedDict)

    def width_of(self, shard: Shard) -> int:
        return self._widths.get(shard, WIDTH)

    def increase(self, shard: Shard) -> None:
        self._set(shard, min(WIDTH_MAX, self.width_of(shard) + WIDTH_STEP))

    def decrease(self, shard: Shard) -> None:
        self._set(shard, max(1, self.width_of(shard) // 2))

    def _set(self, shard: Shard, width: int) -> None:
        self._widths[shard] = width
        self._widths.move_to_end(shard)
        if len(self._widths) > _REMEMBERED_MAX:
            self._widths.popitem(last=False)


async def put_rows(
    concurrency: AdaptiveConcurrency, tasks: Sequence[Task], put: Write[Task], random: Random
) -> None:
    """Writes all rows, each shard at its own rate."""
    by_shard: dict[Shard, deque[Task]] = {}
    for task in tasks:
        by_shard.setdefault((task.run_id, task.shard), deque()).append(task)
    await write_shards(concurrency, by_shard, put, random)


async def write_shards(
    concurrency: AdaptiveConcurrency,
    by_shard: Mapping[Shard, deque[W]],
    write: Write[W],
    random: Random,
) -> None:
    # The failure of one shard does not cancel the writes of others.
    jobs = [
        partial(_write_shard, concurrency, shard, rows, write, random)
        for shard, rows in by_shard.items()
    ]
    unwrap_all(await gather_results(jobs, parallel_max=len(jobs)))


async def _write_shard(
    concurrency: AdaptiveConcurrency, shard: Shard, rows: deque[W], write: Write[W], random: Random
) -> None:
    throttled = lost = 0  # Consecutive waves without one success.
    while rows:
        wave = [rows.popleft() for _ in range(min(concurrency.width_of(shard), len(rows)))]
        left, errors = await _write_wave(wave, write)
        # To the front: they are written again before new rows.
        rows.extendleft(reversed(left))
        is_throttled = any(_is_throttle(error) for error in errors)
        if not left:
            concurrency.increase(shard)
        if len(left) < len(wave):
            throttled = lost = 0
        elif is_throttled:
            throttled += 1
        else:
            lost += 1
        if throttled == _THROTTLED_MAX or lost == _LOST_MAX:
            raise errors[0]
        if is_throttled:
            concurrency.decrease(shard)
            await trio.sleep(backoff_s(1 + throttled, random))


async def _write_wave(wave: Sequence[W], write: Write[W]) -> tuple[list[W], list[Unavailable]]:
    """Writes a wave. Returns the rows that are left, and why."""
    batches = slices(wave, WRITTEN_MAX)
    results = await gather_results(
        [partial(write, batch) for batch in batches], parallel_max=len(batches)
    )
    left: list[W] = []
    errors: list[Unavailable] = []
    for batch, result in zip(batches, results, strict=True):
        if isinstance(result, AwsError | QueueGone):
            raise result
        if isinstance(result, Unavailable):
            left += batch
            errors.append(result)
        elif result:
            left += result
            errors.append(throttled_error())
    return left, errors


def throttled_error() -> Unavailable:
    error = Unavailable("the table throttles a part of a batch again and again")
    error.__cause__ = AwsError(THROTTLED, "a part of a batch")
    return error


def _is_throttle(error: Unavailable) -> bool:
    return isinstance(error.__cause__, AwsError) and is_refused_for_now(error.__cause__)


# The operations of the table.


# How often, and how long, a partly processed or overtaken call is repeated. Then the caller gets
# Unavailable and decides itself.
ROUNDS_MAX = 8
ROUNDS_S_MAX = 20.0

REFUSED = "ConditionalCheckFailedException"
THROTTLED = "ProvisionedThroughputExceededException"
CANCELLED = "TransactionCanceledException"
INVALID = "ValidationException"
# The codes of single statements, which have no "Exception".
_DUPLICATE = "DuplicateItem"
_STATEMENT_REFUSED_FOR_NOW = frozenset(
    {
        "InternalServerError",
        "ProvisionedThroughputExceeded",
        "RequestLimitExceeded",
        "ThrottlingError",
        "TransactionConflict",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """`meter` counts the rows that were read and returned. `concurrency` remembers the width of
    each shard, and `damage` the undecodable rows that were skipped."""

    name: str
    client: AwsClient
    random: Random
    meter: Meter = field(default_factory=Meter)
    concurrency: AdaptiveConcurrency = field(default_factory=AdaptiveConcurrency)
    damage: DamageLog = field(default_factory=DamageLog)

    async def call(
        self, operation: str, params: Params, *, attempts_max: int = ATTEMPTS_MAX
    ) -> dict[str, Any]:
        return await self.client.call("dynamodb", operation, params, attempts_max=attempts_max)

    async def get(self, key: AnyKey) -> Any:
        """Returns the row as of its last commit, or None."""
        params = {
            "TableName": self.name,
            "Key": key_item(item_key(key)),
            "ConsistentRead": True,
        }
        item = (await self.call("GetItem", params)).get("Item")
        return None if item is None else codec_for(key).from_item(item)

    async def get_all(self, keys: Sequence[AnyKey]) -> dict[AnyKey, Any]:
        """Returns the rows that exist, as of their last commits."""
        unique_keys = list(dict.fromkeys(keys))
        if len(unique_keys) == 1:
            row = await self.get(unique_keys[0])
            return {} if row is None else {unique_keys[0]: row}
        items_by_place = await self.get_items([item_key(key) for key in unique_keys])
        return {
            key: codec_for(key).from_item(item)
            for key in unique_keys
            if (item := items_by_place.get(item_key(key))) is not None
        }

    async def get_items(
        self, places: Iterable[Place], *, is_consistent: bool = True
    ) -> dict[Place, Item]:
        """Returns the items that exist. `places` may contain duplicates.

        They are removed here, because DynamoDB refuses a request with duplicates. A read that is
        not consistent costs half, and may miss the changes of about the last second.
        """
        unique_places = list(dict.fromkeys(places))
        get = partial(self._get_slice, is_consistent=is_consistent)
        pages = await gather(get, slices(unique_places, READ_MAX)) if unique_places else []
        return {place_in(item): item for page in pages for item in page}

    async def _get_slice(self, places: Sequence[Place], *, is_consistent: bool) -> list[Item]:
        items: list[Item] = []
        keys = [key_item(place) for place in places]

        async def ask() -> bool:
            request_items = {self.name: {"Keys": list(keys), "ConsistentRead": is_consistent}}
            answer = await self.call("BatchGetItem", {"RequestItems": request_items})
            items.extend(answer.get("Responses", {}).get(self.name, ()))
            keys[:] = answer.get("UnprocessedKeys", {}).get(self.name, {}).get("Keys", ())
            return not keys

        await self._until_done(ask)
        return items

    async def remove(self, places: Sequence[Place]) -> None:
        """Removes items without a condition."""
        if unique_places := list(dict.fromkeys(places)):
            await gather(self._remove_slice, slices(unique_places, WRITTEN_MAX))

    async def _remove_slice(self, places: Sequence[Place]) -> None:
        requests = [{"DeleteRequest": {"Key": key_item(place)}} for place in places]

        async def ask() -> bool:
            request_items = {self.name: list(requests)}
            answer = await self.call("BatchWriteItem", {"RequestItems": request_items})
            requests[:] = answer.get("UnprocessedItems", {}).get(self.name, ())
            return not requests

        await self._until_done(ask)

    async def remove_from_shards(self, places: Sequence[Place]) -> None:
        """Removes items of many partitions, each at the rate that the partition accepts."""
        by_shard: dict[str, list[Place]] = {}
        for place in dict.fromkeys(places):
            by_shard.setdefault(place[0], []).append(place)
        work: dict[Shard, deque[Place]] = {
            ("remove", shard): deque(its) for shard, its in by_shard.items()
        }
        await write_shards(self.concurrency, work, self._remove_once, self.random)

    async def _remove_once(self, places: Sequence[Place]) -> list[Place]:
        """Sends one batch and returns the unprocessed items.

        One attempt, because `write_shards` adapts the rate itself.
        """
        requests = [{"DeleteRequest": {"Key": key_item(place)}} for place in places]
        params = {"RequestItems": {self.name: requests}}
        answer = await self.call("BatchWriteItem", params, attempts_max=1)
        undone = answer.get("UnprocessedItems", {}).get(self.name, ())
        return [place_in(request["DeleteRequest"]["Key"]) for request in undone]

    async def insert(self, items: Sequence[Item]) -> list[int]:
        """Inserts up to WRITTEN_MAX items of different keys, and keeps items that exist. Returns
        the numbers of those that were throttled.

        BatchWriteItem cannot do this: it has no conditions and would replace items. An INSERT of
        PartiQL refuses an existing key by itself, and costs as much as a conditional PutItem. One
        attempt, because `write_shards` adapts the rate itself.
        """
        params = {
            "Statements": [insert_statement(self.name, item) for item in items],
            "ReturnConsumedCapacity": "TOTAL",
        }
        answer = await self.call("BatchExecuteStatement", params, attempts_max=1)
        # The answer is a success even if every statement failed.
        responses = answer.get("Responses", ())
        if len(responses) != len(items):
            raise Unavailable("the table did not answer every statement of a batch")
        return [n for n, said in enumerate(responses) if not is_inserted(said.get("Error"))]

    async def write(
        self, operation: str, params: Params, *, attempts_max: int = ATTEMPTS_MAX
    ) -> Item | None:
        """Returns the item as written, if requested; None if its condition failed."""
        try:
            answer = await self.call(operation, params, attempts_max=attempts_max)
        except AwsError as error:
            if error.code == REFUSED:
                return None
            raise
        attributes: Item = answer.get("Attributes", {})
        return attributes

    async def write_together(self, steps: Sequence[dict[str, Params]]) -> list[int] | None:
        """Writes all steps or none. Returns None, or the steps whose conditions failed.

        The token is new for every call and the same for its retries. So a retry after a lost answer
        does not write twice, but two calls with equal steps do.
        """
        assert len(steps) <= ATOMIC_MAX, "more than one transaction takes"
        token = f"{self.random.getrandbits(128):032x}"
        params = {"TransactItems": list(steps), "ClientRequestToken": token}
        try:
            await self.call("TransactWriteItems", params)
        except AwsError as error:
            if error.code != CANCELLED:
                raise
            failed = [n for n, why in enumerate(error.reasons) if why == "ConditionalCheckFailed"]
            # Failed conditions come first: they are definite, and conflicts beside them are not.
            if failed:
                return failed
            if any(why == "ValidationError" for why in error.reasons):
                raise
            raise Unavailable(str(error)) from error
        return None

    async def _until_done(self, ask: Callable[[], Any]) -> None:
        ends_at = trio.current_time() + ROUNDS_S_MAX
        for number in range(ROUNDS_MAX):
            if await ask():
                return
            if trio.current_time() >= ends_at:
                break
            await trio.sleep(backoff_s(number, self.random))
        raise Unavailable("the table keeps leaving something undone")


def insert_statement(table: str, item: Item) -> Params:
    # Values are parameters. Names are those of the fields of a row, which contain no quote.
    names = ", ".join(f"'{name}': ?" for name in item)
    statement = f'INSERT INTO "{table}" VALUE {{{names}}}'
    return {"Statement": statement, "Parameters": list(item.values())}


def is_inserted(error: Mapping[str, Any] | None) -> bool:
    """Returns whether the item exists after its statement; False if it was refused for now. Raises
    the error if a repetition cannot help."""
    if error is not None and error["Code"] not in {_DUPLICATE, *_STATEMENT_REFUSED_FOR_NOW}:
        refusal = AwsError(error["Code"], error.get("Message", ""))
        # Permissions are those of the table, so a denial concerns every statement of the batch.
        raise_translated(refusal, "dynamodb.BatchExecuteStatement", was_lost=False)
    return error is None or error["Code"] == _DUPLICATE


def place_in(item: Item) -> Place:
    return item[PK]["S"], item[SK]["S"]


# The schema: creates the table, its indexes and its expiry if they are missing
# (docs/storage.md, DynamoDB table).


# A new table becomes active within seconds as a rule. The wait ends after five minutes.
POLL_S = 1.0
LOOKS_MAX = 300

_THERE = "ResourceInUseException"
_NOT_THERE = "ResourceNotFoundException"
_READY = "ACTIVE"


class WrongTable(ConveyorError):
    """A table of that name exists, but with other keys or another expiry than Conveyor's."""


async def create_table(client: AwsClient, name: str) -> None:
    """Creates the table and waits until it can be used. An existing table is fine.

    Raises WrongTable if a table of that name has other keys.
    """
    try:
        await client.call("dynamodb", "CreateTable", definition(name))
    except AwsError as error:
        if error.code != _THERE:
            raise
    for _ in range(LOOKS_MAX):
        if await _is_ready(client, name):
            break
        await trio.sleep(POLL_S)
    else:
        raise Unavailable(f"table {name} is not ready")
    await _let_rows_expire(client, name)


async def _is_ready(client: AwsClient, name: str) -> bool:
    try:
        table = (await client.call("dynamodb", "DescribeTable", {"TableName": name}))["Table"]
    except AwsError as error:
        if error.code != _NOT_THERE:
            raise
        return False  # DescribeTable is eventually consistent: a new table may seem missing.
    _check_keys(name, table)
    states = [
        index_description.get("IndexStatus", _READY)
        for index_description in table.get("GlobalSecondaryIndexes", ())
    ]
    return all(state == _READY for state in [table["TableStatus"], *states])


def _check_keys(name: str, table: dict[str, Any]) -> None:
    expected = definition(name)
    indexes = {
        index_description["IndexName"]: index_description
        for index_description in table.get("GlobalSecondaryIndexes", ())
    }
    pairs = [(expected["KeySchema"], table.get("KeySchema"))]
    for index in expected["GlobalSecondaryIndexes"]:
        there = indexes.get(index["IndexName"], {})
        pairs.append((index["KeySchema"], there.get("KeySchema")))
    if any(ours != theirs for ours, theirs in pairs):
        raise WrongTable(
            f"table {name} is there with other keys or indexes than Conveyor's: "
            "give CONVEYOR_TABLE another name, or remove that table"
        )


async def _let_rows_expire(client: AwsClient, name: str) -> None:
    said = await client.call("dynamodb", "DescribeTimeToLive", {"TableName": name})
    there = said.get("TimeToLiveDescription", {})
    if there.get("TimeToLiveStatus") in {"ENABLED", "ENABLING"}:
        if there.get("AttributeName", TTL) != TTL:
            raise WrongTable(
                f"table {name} lets rows expire by {there['AttributeName']}, not {TTL}"
            )
        return
    expiry = {"AttributeName": TTL, "Enabled": True}
    await client.call(
        "dynamodb", "UpdateTimeToLive", {"TableName": name, "TimeToLiveSpecification": expiry}
    )


def definition(name: str) -> dict[str, Any]:
    """Returns the definition of the table.

    Indexes contain keys only, because every row that an index names is read again by its key.
    """
    attributes = [PK, SK, *(part for index in INDEXES for part in (index.pk, index.sk))]
    return {
        "TableName": name,
        "BillingMode": "PAY_PER_REQUEST",
        "KeySchema": _keys(PK, SK),
        "AttributeDefinitions": [
            {"AttributeName": attribute, "AttributeType": "S"} for attribute in attributes
        ],
        # KEYS_ONLY: copies of whole rows would cost write units at every change of a row.
        "GlobalSecondaryIndexes": [
            {
                "IndexName": index.name,
                "KeySchema": _keys(index.pk, index.sk),
                "Projection": {"ProjectionType": "KEYS_ONLY"},
            }
            for index in INDEXES
        ],
    }


def _keys(partition: str, sort: str) -> list[dict[str, str]]:
    return [
        {"AttributeName": partition, "KeyType": "HASH"},
        {"AttributeName": sort, "KeyType": "RANGE"},
    ]
