"""Models batches of PartiQL INSERT statements; each statement succeeds or fails by itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conveyor.simulation.models.dynamodb.capacity import Capacity
from conveyor.simulation.models.dynamodb.tables import Table
from conveyor.simulation.models.dynamodb.values import Item, NotModelled, check_known, invalid
from conveyor.simulation.models.dynamodb.writes import Write, checked_write

# The limits of DynamoDB for a batch and for one statement.
STATEMENTS_MAX = 25
STATEMENT_CHARS_MAX = 8192

_INSERT = re.compile(r"""INSERT INTO "([A-Za-z0-9_.-]+)" VALUE \{(.+)\}\Z""")
_FIELD = re.compile(r"'([^']+)': \?\Z")
_KNOWN = frozenset({"Statement", "Parameters"})

Params = Mapping[str, Any]
Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Statements:
    """`is_held` returns whether a transaction holds an item; `is_left` draws whether a fault leaves
    a statement undone."""

    table: Callable[[str], Table]
    capacity: Callable[[str], Capacity]
    is_held: Callable[[str, tuple[str, str]], bool]
    is_left: Callable[[], bool]

    def run(self, params: Params) -> tuple[list[Answer], float]:
        """The answers, one per statement, and the units of all of them."""
        statements = params["Statements"]
        if not 1 <= len(statements) <= STATEMENTS_MAX:
            raise invalid(f"1 to {STATEMENTS_MAX} statements make a batch")
        inserts = [_parsed(statement) for statement in statements]
        writes = [
            (name, table := self.table(name), checked_write(table, "Put", {"Item": item}))
            for name, item in inserts
        ]
        keys = [(name, write.key) for name, _, write in writes]
        if len(set(keys)) != len(keys):
            raise invalid("Provided list of item keys contains duplicates")
        answers: list[Answer] = []
        total = 0.0
        for name, table, write in writes:
            units = write.units(table)
            code = self._refusal(name, write, units)
            if code in {None, "DuplicateItem"}:
                total += sum(units.values())
            if code is None:
                table.put(write.key, write.new)
            error = {} if code is None else {"Error": {"Code": code, "Message": code}}
            answers.append({"TableName": name, **error})
        return answers, total

    def _refusal(self, name: str, write: Write, units: Mapping[Any, float]) -> str | None:
        """The error code of a statement, or None. As in DynamoDB, an INSERT that is refused because
        the item exists still consumes its units."""
        if self.is_held(name, write.key):
            return "TransactionConflict"
        if self.is_left():
            return "ThrottlingError"
        refusal = self.capacity(name).take_writes(units)
        if refusal is not None:
            return refusal
        return None if write.old is None else "DuplicateItem"


def _parsed(statement: Params) -> tuple[str, Item]:
    check_known("a statement", statement, _KNOWN)
    text: str = statement["Statement"]
    if len(text) > STATEMENT_CHARS_MAX:
        raise invalid("a statement is too long")
    if (insert := _INSERT.match(text)) is None:
        raise NotModelled(f"the statement {text[:80]}")
    names = [_name(field) for field in insert[2].split(", ")]
    values: Sequence[Any] = statement.get("Parameters", ())
    if len(names) != len(values) or len(set(names)) != len(names):
        raise invalid("the parameters do not match the statement")
    return insert[1], dict(zip(names, values, strict=True))


def _name(field: str) -> str:
    if (named := _FIELD.match(field)) is None:
        raise NotModelled(f"the field {field}")
    return named[1]
