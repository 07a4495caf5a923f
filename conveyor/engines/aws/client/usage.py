"""Usage of AWS and its list price: us-east-1, on demand, as of June 2026
(docs/engines.md, AWS client).

Prices are in millionths of a dollar per unit and must be replaced when they change. Storage,
transfer and the free tier are not included. DynamoDB halved its prices in November 2024, and older
pages still state the double. The price of SQS is that of the first 100 billion requests a month.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import ceil
from typing import Any

READ_UNIT = 0.125
WRITE_UNIT = 0.625
SQS_REQUEST = 0.4
S3_WRITE_REQUEST = 5.0
S3_READ_REQUEST = 0.4
# A node and its replica (cache.t4g.small), per hour. The number of calls does not matter.
REDIS_HOUR = 2 * 32_000.0

# S3 bills these as PUT, COPY, POST or LIST. Deletes are free, and the other operations are reads.
S3_WRITES = frozenset(
    {
        "CompleteMultipartUpload",
        "CopyObject",
        "CreateMultipartUpload",
        "ListObjectsV2",
        "PutObject",
        "UploadPart",
    }
)
S3_FREE = frozenset({"AbortMultipartUpload", "DeleteObject", "DeleteObjects"})


# Meter: counts the calls to AWS, and computes their list price.
#
# Capacity is computed from item sizes, by the rules of AWS's documentation, unless the answer
# states it. DynamoDB bills an update or a delete by the size of the whole item, which the client
# does not know. The meter uses the size of the parameters, so for items over a kilobyte the bill is
# higher than the meter. Of the indexes the meter sees only what a write sets: a key that is set
# counts as moved, which is a removal and an insert. Index writes that follow from deleted or
# replaced items are not counted.


# The sizes that AWS bills as one unit.
WRITE_UNIT_BYTES = 1024
READ_UNIT_BYTES = 4096
SQS_CHUNK_BYTES = 64 * 1024

Item = Mapping[str, Mapping[str, Any]]
# The two attributes that are the key of an index.
IndexKey = tuple[str, str]

STEP: ContextVar[str] = ContextVar("step", default="")
"""The step that calls are counted for, in benchmarks. Child tasks inherit it."""


@dataclass(slots=True)
class Traffic:
    """Bytes of request and response bodies."""

    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(slots=True)
class Usage:
    """The usage of one step."""

    calls: int = 0
    read_units: float = 0.0
    write_units: float = 0.0
    price_millionths: float = 0.0


@dataclass(slots=True)
class Meter:
    """Counts every attempt, including retries, because AWS bills most of them."""

    indexes: Sequence[IndexKey] = ()
    calls: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    read_units: float = 0.0
    write_units: float = 0.0
    sqs_requests: int = 0
    s3_requests: int = 0
    price_millionths: float = 0.0
    rows_read: int = 0
    rows_returned: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    steps: defaultdict[str, Usage] = field(default_factory=lambda: defaultdict(Usage))

    def count_failure(
        self, service: str, operation: str, params: Mapping[str, Any], *, is_billed: bool
    ) -> None:
        """Counts a failed attempt. AWS bills a failed condition, but not a throttle."""
        self.failures[f"{service}.{operation}"] += 1
        if is_billed:
            self.count(service, operation, params, {})
        else:
            self._note(service, operation)

    def count(
        self, service: str, operation: str, params: Mapping[str, Any], answer: Mapping[str, Any]
    ) -> None:
        """Counts one attempt and its answer."""
        if service == "dynamodb":
            reads, writes = capacity_of(operation, params, answer, self.indexes)
            price = reads * READ_UNIT + writes * WRITE_UNIT
            self._note(service, operation, price, reads=reads, writes=writes)
        elif service == "sqs":
            requests = sqs_requests_of(params, answer)
            self.sqs_requests += requests
            self._note(service, operation, requests * SQS_REQUEST)
        elif service == "s3":
            self.s3_requests += 1
            self._note(service, operation, _s3_price(operation))

    def count_redis(self, command: str) -> None:
        """Counts one command of Redis, without a price: a node costs by the hour."""
        self._note("redis", command)

    def _note(
        self,
        service: str,
        operation: str,
        price_millionths: float = 0.0,
        *,
        reads: float = 0.0,
        writes: float = 0.0,
    ) -> None:
        self.calls[f"{service}.{operation}"] += 1
        self.read_units += reads
        self.write_units += writes
        self.price_millionths += price_millionths
        step = self.steps[STEP.get()]
        step.calls += 1
        step.read_units += reads
        step.write_units += writes
        step.price_millionths += price_millionths


def capacity_of(
    operation: str,
    params: Mapping[str, Any],
    answer: Mapping[str, Any],
    indexes: Sequence[IndexKey] = (),
) -> tuple[float, float]:
    """Returns the read units and write units of one call."""
    said = answer.get("ConsumedCapacity")
    if said:
        return _said_units(operation, said if isinstance(said, list) else [said])
    match operation:
        case "GetItem":
            return _read_units([answer.get("Item", {})], params), 0.0
        case "Query" | "Scan":
            size = sum(map(item_bytes, answer.get("Items", ())))
            return _units(size, READ_UNIT_BYTES) * _read_share(params), 0.0
        case "BatchGetItem":
            responses = answer.get("Responses", {})
            requests = params["RequestItems"]
            return sum(_read_units(responses.get(t, ()), requests[t]) for t in requests), 0.0
        case "TransactGetItems":
            items = [response.get("Item", {}) for response in answer.get("Responses", ())]
            # DynamoDB bills each item of a transaction twice: to prepare and to commit.
            return 2.0 * sum(_units(item_bytes(item), READ_UNIT_BYTES) for item in items), 0.0
        case "PutItem" | "UpdateItem" | "DeleteItem":
            return 0.0, _write_units(params, indexes)
        case "BatchWriteItem":
            write_requests = [w for ws in params["RequestItems"].values() for w in ws]
            writes = [write for request in write_requests for write in request.values()]
            return 0.0, sum(_write_units(write, indexes) for write in writes)
        case "TransactWriteItems":
            steps = [
                step for transact_item in params["TransactItems"] for step in transact_item.values()
            ]
            return 0.0, 2.0 * sum(_write_units(step, indexes) for step in steps)
        case _:
            return 0.0, 0.0


def sqs_requests_of(params: Mapping[str, Any], answer: Mapping[str, Any]) -> int:
    """Returns the billed requests: SQS bills every 64 KB of messages as one request."""
    size = len(params.get("MessageBody", ""))
    size += sum(len(entry.get("MessageBody", "")) for entry in params.get("Entries", ()))
    size += sum(len(message.get("Body", "")) for message in answer.get("Messages", ()))
    return int(_units(size, SQS_CHUNK_BYTES))


def item_bytes(item: Item) -> int:
    """Returns the size that DynamoDB bills: names and values, in UTF-8."""
    size = 0
    for name, value in item.items():
        size += len(name) if name.isascii() else len(name.encode())
        # Most values are plain texts, and every write passes here: texts have a short path.
        text = value.get("S")
        size += len(text) if text is not None and text.isascii() else _value_bytes(value)
    return size


def _value_bytes(value: Mapping[str, Any]) -> int:
    ((kind, inner),) = value.items()
    match kind:
        case "S":
            return len(inner) if inner.isascii() else len(inner.encode())
        case "N":
            return len(inner) // 2 + 2
        case "B":
            return len(inner)
        case "M":
            return 3 + len(inner) + item_bytes(inner)
        case "L":
            return 3 + len(inner) + sum(map(_value_bytes, inner))
        case "SS" | "NS" | "BS":
            return sum(len(member) for member in inner)
        case _:
            return 1


def _units(size_bytes: int, unit_bytes: int) -> float:
    # AWS bills at least one unit, even for an empty answer.
    return float(max(1, ceil(size_bytes / unit_bytes)))


def _read_share(params: Mapping[str, Any]) -> float:
    # DynamoDB bills an eventually consistent read at half the price.
    return 1.0 if params.get("ConsistentRead") else 0.5


def _read_units(items: Iterable[Item], params: Mapping[str, Any]) -> float:
    return _read_share(params) * sum(_units(item_bytes(item), READ_UNIT_BYTES) for item in items)


def _write_units(write: Mapping[str, Any], indexes: Sequence[IndexKey]) -> float:
    item = write.get("Item")
    if item is not None:
        index_count = sum(pk in item and sk in item for pk, sk in indexes)
        return _units(item_bytes(item), WRITE_UNIT_BYTES) + index_count
    size = item_bytes(write.get("Key", {}))
    changes = write.get("UpdateExpression", "")
    if changes:
        size += item_bytes(write.get("ExpressionAttributeValues", {}))
    return _units(size, WRITE_UNIT_BYTES) + _moves(changes, write, indexes)


def _moves(changes: str, write: Mapping[str, Any], indexes: Sequence[IndexKey]) -> int:
    """Returns the units of the indexes in which an update moves or removes its item."""
    names = write.get("ExpressionAttributeNames", {})
    marks = {name: mark for mark, name in names.items()}
    units = 0
    for key in indexes:
        touched = [marks[part] for part in key if part in marks]
        # A key that is set moves the item within the index: one removal and one insert.
        if any(f"{mark} =" in changes for mark in touched):
            units += 2
        elif any(mark in changes for mark in touched):
            units += 1
    return units


def _said_units(operation: str, said: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    total = sum(float(consumed["CapacityUnits"]) for consumed in said)
    is_read = "Get" in operation or operation in {"Query", "Scan"}
    return (total, 0.0) if is_read else (0.0, total)


def _s3_price(operation: str) -> float:
    if operation in S3_FREE:
        return 0.0
    is_write = operation in S3_WRITES
    return S3_WRITE_REQUEST if is_write else S3_READ_REQUEST
