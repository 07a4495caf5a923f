"""Models transactions: they write all items or none, are applied once per token, and conflict with
each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec

from conveyor.engines.aws.errors import AwsError
from conveyor.simulation.models.dynamodb import queries
from conveyor.simulation.models.dynamodb.capacity import TABLE, Capacity, Place, read_units
from conveyor.simulation.models.dynamodb.tables import Key, Table
from conveyor.simulation.models.dynamodb.values import invalid
from conveyor.simulation.models.dynamodb.writes import Write, checked_write
from conveyor.simulation.models.fault_source import FaultSource

# The limits of DynamoDB for a transaction: its items, its bytes, and how long a token is
# remembered.
ITEMS_MAX = 100
BYTES_MAX = 4 * 1024 * 1024
TOKEN_S = 600.0

_FINE = "None"
_CONFLICT = "TransactionConflict"
_encode = msgspec.json.Encoder().encode

Params = Mapping[str, Any]
Spot = tuple[str, Key]


@dataclass(slots=True)
class Transactions:
    """`_held` are the items that a recent transaction still holds, each with the instant at which
    that ends."""

    fault_source: FaultSource
    now: Callable[[], float]
    table: Callable[[str], Table]
    capacity: Callable[[str], Capacity]
    _tokens: dict[str, bytes] = field(default_factory=dict)
    _token_ends: deque[tuple[float, str]] = field(default_factory=deque)
    _held: dict[Spot, float] = field(default_factory=dict)

    def is_held(self, table: str, key: Key) -> bool:
        """Whether a recent transaction still holds the item, so that other writes to it
        conflict."""
        if not self._held:
            return False
        until = self._held.get((table, key))
        if until is None:
            return False
        if until <= self.now():
            del self._held[table, key]
            return False
        self.fault_source.count("dynamodb.conflict")
        return True

    def write(self, params: Params) -> dict[str, Any]:
        """Applies all writes of a TransactWriteItems, or none."""
        token = params.get("ClientRequestToken")
        digest = b"" if token is None else _digest(params["TransactItems"])
        if token is not None and self._is_done(token, digest):
            return {}
        steps = [next(iter(item.items())) for item in params["TransactItems"]]
        if not 1 <= len(steps) <= ITEMS_MAX:
            raise invalid(f"1 to {ITEMS_MAX} items make a transaction")
        tables = [self.table(fields["TableName"]) for _, fields in steps]
        writes = [
            checked_write(table, kind, fields)
            for table, (kind, fields) in zip(tables, steps, strict=True)
        ]
        places = [
            (fields["TableName"], w.key) for (_, fields), w in zip(steps, writes, strict=True)
        ]
        if len(set(places)) != len(places):
            raise invalid("Transaction request cannot include multiple operations on one item")
        if sum(0 if w.new is None else w.new.size_bytes for w in writes) > BYTES_MAX:
            raise invalid("Transaction request cannot exceed 4 MB")
        self._refuse(places, writes)
        units = self._take(places, tables, writes)
        for table, write in zip(tables, writes, strict=True):
            if write.kind != "ConditionCheck":
                table.put(write.key, write.new)
        self._hold(places)
        if token is not None:
            self._tokens[token] = digest
            self._token_ends.append((self.now() + TOKEN_S, token))
        if params.get("ReturnConsumedCapacity", "NONE") == "NONE":
            return {}
        return {
            "ConsumedCapacity": [
                {"TableName": name, "CapacityUnits": count} for name, count in units.items()
            ]
        }

    def get(self, params: Params) -> dict[str, Any]:
        """Reads all items of a TransactGetItems at one instant."""
        requests = [item["Get"] for item in params["TransactItems"]]
        if not 1 <= len(requests) <= ITEMS_MAX:
            raise invalid(f"1 to {ITEMS_MAX} items make a transaction")
        answers: list[dict[str, Any]] = []
        reasons: list[str] = []
        for request in requests:
            table = self.table(request["TableName"])
            key = table.key_of(request["Key"])
            row = table.get(key)
            units = 2 * read_units(0 if row is None else row.size_bytes, is_consistent=True)
            is_held = self.is_held(request["TableName"], key)
            refusal = self.capacity(request["TableName"]).take_reads({(TABLE, key[0]): units})
            reasons.append(_CONFLICT if is_held else refusal or _FINE)
            answers.append({} if row is None else {"Item": queries.projected(row.item, request)})
        _cancel(reasons)
        return {"Responses": answers}

    def _is_done(self, token: str, digest: bytes) -> bool:
        while self._token_ends and self._token_ends[0][0] <= self.now():
            self._tokens.pop(self._token_ends.popleft()[1])
        known = self._tokens.get(token)
        if known is None:
            return False
        if known != digest:
            raise AwsError(
                "IdempotentParameterMismatchException", "the token was used for something else"
            )
        rate = self.fault_source.service_rates.dynamodb.in_progress_rate
        if self.fault_source.occurs("dynamodb.in_progress", rate):
            raise AwsError("TransactionInProgressException", "the same request is in progress")
        return True

    def _refuse(self, places: Sequence[Spot], writes: Sequence[Write]) -> None:
        reasons = [_reason(write) for write in writes]
        for number, (table, key) in enumerate(places):
            if self.is_held(table, key):
                reasons[number] = _CONFLICT
        if self.fault_source.occurs(
            "dynamodb.conflict", self.fault_source.service_rates.dynamodb.conflict_rate
        ):
            reasons[self.fault_source.below(len(reasons))] = _CONFLICT
        _cancel(reasons)

    def _take(
        self, places: Sequence[Spot], tables: Sequence[Table], writes: Sequence[Write]
    ) -> dict[str, float]:
        """Takes twice the units of the writes: DynamoDB prepares every write of a transaction
        before it makes it."""
        units_by_table: dict[str, dict[Place, float]] = {}
        for (name, _), table, write in zip(places, tables, writes, strict=True):
            units = units_by_table.setdefault(name, {})
            for partition, count in write.units(table).items():
                units[partition] = units.get(partition, 0.0) + 2 * count
        for name, units in units_by_table.items():
            refusal = self.capacity(name).take_writes(units)
            if refusal is not None:
                _cancel([refusal, *[_FINE] * (len(writes) - 1)])
        return {name: sum(units.values()) for name, units in units_by_table.items()}

    def _hold(self, places: Sequence[Spot]) -> None:
        most_s = self.fault_source.service_rates.dynamodb.conflict_s
        if most_s:
            until = self.now() + self.fault_source.seconds((0.0, most_s))
            self._held.update(dict.fromkeys(places, until))


def _reason(write: Write) -> str:
    if not write.fits:
        return "ConditionalCheckFailed"
    return _FINE if write.fault is None else "ValidationError"


def _cancel(reasons: Sequence[str]) -> None:
    if any(reason != _FINE for reason in reasons):
        raise AwsError(
            "TransactionCanceledException", f"Transaction cancelled: {reasons}", reasons=reasons
        )


def _digest(items: object) -> bytes:
    return blake2b(_encode(items), digest_size=16).digest()
