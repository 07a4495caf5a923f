"""The operations of DynamoDB that the engine uses on items; each takes effect at one instant
(docs/simulator.md, Models).

Unknown parameters raise NotModelled, so that no part of a request is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from conveyor.engines.aws.errors import AwsError
from conveyor.simulation.models.dynamodb import control, queries
from conveyor.simulation.models.dynamodb.capacity import TABLE, Capacity, read_units
from conveyor.simulation.models.dynamodb.statements import Statements
from conveyor.simulation.models.dynamodb.tables import Key, Table
from conveyor.simulation.models.dynamodb.transactions import Transactions
from conveyor.simulation.models.dynamodb.values import Item, NotModelled, check_known, invalid
from conveyor.simulation.models.dynamodb.writes import REFUSED, Write, checked_write, throttled
from conveyor.simulation.models.fault_source import FaultSource

# The limits of DynamoDB for a BatchGetItem, a BatchWriteItem and one response.
READ_MAX = 100
WRITTEN_MAX = 25
ANSWER_BYTES_MAX = 16 * 1024 * 1024

Params = Mapping[str, Any]
Answer = dict[str, Any]

_BATCH = frozenset({"RequestItems", "ReturnConsumedCapacity"})
_KNOWN: dict[str, frozenset[str]] = {
    "GetItem": frozenset(
        {
            "TableName",
            "Key",
            "ConsistentRead",
            "ProjectionExpression",
            "ExpressionAttributeNames",
            "ReturnConsumedCapacity",
        }
    ),
    "BatchExecuteStatement": frozenset({"Statements", "ReturnConsumedCapacity"}),
    "BatchGetItem": _BATCH,
    "BatchWriteItem": _BATCH,
    "TransactGetItems": frozenset({"TransactItems", "ReturnConsumedCapacity"}),
    "TransactWriteItems": frozenset(
        {"TransactItems", "ClientRequestToken", "ReturnConsumedCapacity"}
    ),
}


@dataclass(slots=True)
class DynamoModel:
    """All tables of one account."""

    fault_source: FaultSource
    now: Callable[[], float]
    tables: dict[str, Table] = field(default_factory=dict)
    _capacities: dict[str, Capacity] = field(default_factory=dict)
    _transactions: Transactions = field(init=False)
    _statements: Statements = field(init=False)
    _handlers: dict[str, Callable[[Params], Answer]] = field(init=False)

    def __post_init__(self) -> None:
        self._transactions = Transactions(self.fault_source, self.now, self.table, self.capacity)
        is_left = partial(self._is_left_unprocessed, "items")
        self._statements = Statements(
            self.table, self.capacity, self._transactions.is_held, is_left
        )
        self._handlers = {
            "GetItem": self._get,
            "PutItem": lambda params: self._write("Put", params),
            "UpdateItem": lambda params: self._write("Update", params),
            "DeleteItem": lambda params: self._write("Delete", params),
            "BatchExecuteStatement": self._batch_execute,
            "BatchGetItem": self._batch_get,
            "BatchWriteItem": self._batch_write,
            "TransactWriteItems": self._transactions.write,
            "TransactGetItems": self._transactions.get,
        }

    def run(self, operation: str, params: Params) -> Answer:
        """Applies one operation at this instant."""
        if operation == "Query":
            table = self.table(params["TableName"])
            return queries.query(table, self.capacity(params["TableName"]), params)
        handler = self._handlers.get(operation)
        if handler is None:
            return control.do(self.tables, self.fault_source, self.now, operation, params)
        if operation in _KNOWN:
            check_known(operation, params, _KNOWN[operation])
        return handler(params)

    def table(self, name: str) -> Table:
        """The table, with index entries and expiry up to date."""
        table = self.tables.get(name)
        if table is None:
            raise AwsError("ResourceNotFoundException", f"Requested resource not found: {name}")
        table.settle()
        return table

    def capacity(self, name: str) -> Capacity:
        capacity = self._capacities.get(name)
        if capacity is None:
            capacity = self._capacities[name] = Capacity(self.fault_source, self.now)
        return capacity

    def _get(self, params: Params) -> Answer:
        table = self.table(params["TableName"])
        key = table.key_of(params["Key"])
        is_consistent = bool(params.get("ConsistentRead"))
        row = queries.read_row(table, key, is_consistent=is_consistent)
        units = read_units(0 if row is None else row.size_bytes, is_consistent=is_consistent)
        refusal = self.capacity(params["TableName"]).take_reads({(TABLE, key[0]): units})
        if refusal is not None:
            raise throttled(refusal)
        item = None if row is None else queries.projected(row.item, params)
        return consumed(params, units, {} if item is None else {"Item": item})

    def _write(self, kind: str, params: Params) -> Answer:
        table = self.table(params["TableName"])
        write = checked_write(table, kind, params)
        self._refuse_in_conflict(params["TableName"], write.key)
        units = write.units(table)
        refusal = self.capacity(params["TableName"]).take_writes(units)
        if refusal is not None:
            raise throttled(refusal)
        if not write.fits:
            raise AwsError(REFUSED, "The conditional request failed")
        if write.fault is not None:
            raise write.fault
        table.put(write.key, write.new)
        answer = write.answer(params.get("ReturnValues", "NONE"))
        return consumed(params, sum(units.values()), answer)

    def _refuse_in_conflict(self, table: str, key: Key) -> None:
        if self._transactions.is_held(table, key):
            raise AwsError("TransactionConflictException", "Transaction is ongoing for the item")

    def _batch_get(self, params: Params) -> Answer:
        requests_by_table = params["RequestItems"]
        if (
            sum(len(table_request["Keys"]) for table_request in requests_by_table.values())
            > READ_MAX
        ):
            raise invalid("Too many items requested for the BatchGetItem call")
        items_by_table: dict[str, list[Item]] = {}
        left: dict[str, Any] = {}
        total, size_bytes, is_any_done = 0.0, 0, False
        for name, request in requests_by_table.items():
            table, capacity = self.table(name), self.capacity(name)
            keys = [table.key_of(key) for key in request["Keys"]]
            _refuse_duplicates(keys)
            is_consistent = bool(request.get("ConsistentRead"))
            for key in keys:
                row = queries.read_row(table, key, is_consistent=is_consistent)
                row_bytes = 0 if row is None else row.size_bytes
                units = read_units(row_bytes, is_consistent=is_consistent)
                is_over = size_bytes + row_bytes > ANSWER_BYTES_MAX
                if (
                    is_over
                    or self._is_left_unprocessed("keys")
                    or capacity.take_reads({(TABLE, key[0]): units})
                ):
                    _unprocessed_keys(left, name, request).append(table.key_item(key))
                    continue
                is_any_done, total, size_bytes = True, total + units, size_bytes + row_bytes
                if row is not None:
                    items_by_table.setdefault(name, []).append(queries.projected(row.item, request))
        if not is_any_done:
            raise throttled("ProvisionedThroughputExceeded")
        return consumed(params, total, {"Responses": items_by_table, "UnprocessedKeys": left})

    def _batch_write(self, params: Params) -> Answer:
        requests_by_table: Mapping[str, Sequence[Mapping[str, Params]]] = params["RequestItems"]
        if not 1 <= sum(map(len, requests_by_table.values())) <= WRITTEN_MAX:
            raise invalid("Too many items requested for the BatchWriteItem call")
        writes: list[tuple[str, Table, Any, Write]] = []
        for name, requests in requests_by_table.items():
            table = self.table(name)
            table_writes = [_batched(table, request) for request in requests]
            _refuse_duplicates([write.key for write in table_writes])
            writes += [
                (name, table, request, write)
                for request, write in zip(requests, table_writes, strict=True)
            ]
        left: dict[str, list[Any]] = {}
        total = 0.0
        for name, table, request, write in writes:
            units = write.units(table)
            is_held = self._transactions.is_held(name, write.key)
            if (
                is_held
                or self._is_left_unprocessed("items")
                or self.capacity(name).take_writes(units)
            ):
                left.setdefault(name, []).append(request)
            else:
                table.put(write.key, write.new)
                total += sum(units.values())
        if sum(map(len, left.values())) == len(writes):
            raise throttled("ProvisionedThroughputExceeded")
        return consumed(params, total, {"UnprocessedItems": left})

    def _batch_execute(self, params: Params) -> Answer:
        answers, units = self._statements.run(params)
        return consumed(params, units, {"Responses": answers})

    def _is_left_unprocessed(self, what: str) -> bool:
        rate = self.fault_source.service_rates.dynamodb.unprocessed_rate
        return self.fault_source.occurs(f"dynamodb.unprocessed_{what}", rate)


def consumed(params: Params, units: float, answer: Answer) -> Answer:
    """Adds the consumed capacity to the answer, if the request asks for it."""
    if params.get("ReturnConsumedCapacity", "NONE") == "NONE":
        return answer
    name = params.get("TableName")
    said = {"CapacityUnits": units} | ({"TableName": name} if name else {})
    return answer | {"ConsumedCapacity": said if name else [said]}


def _batched(table: Table, request: Mapping[str, Params]) -> Write:
    ((kind, fields),) = request.items()
    if kind not in {"PutRequest", "DeleteRequest"}:
        raise NotModelled(kind)
    return checked_write(table, kind.removesuffix("Request"), fields)


def _unprocessed_keys(left: dict[str, Any], name: str, request: Params) -> list[Item]:
    if name not in left:
        left[name] = {**request, "Keys": []}
    keys: list[Item] = left[name]["Keys"]
    return keys


def _refuse_duplicates(keys: Sequence[Key]) -> None:
    if not keys:
        raise invalid("a batch without keys")
    if len(set(keys)) != len(keys):
        raise invalid("Provided list of item keys contains duplicates")
