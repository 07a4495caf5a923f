"""Commits a change as one conditional write or as one transaction
(docs/engines.md, DynamoDB store).

The problem: the store must decide on guards, write, and return the rows or the reason of a refusal.
Reading before each write would cost a read unit per row and would not be safe without a condition
anyway. So the store writes first. The guard is the condition of the write:

- A change of one row is one conditional write, 1 unit. DynamoDB returns the new row with it.
- A change of several rows is one transaction, 2 units a row. DynamoDB returns no rows for it, so
  the store reads the changed rows afterwards, and may see a later change.
- Only after a refusal does the store read the rows, to return the reason. If all guards hold by
  then, another writer changed a row in between, and the store tries the write again.

A transaction has a token that is new per change and the same for its retries, so a lost answer is
harmless. A conditional write without an answer is not retried, because its second try would be
refused by its own first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_never

import msgspec
import trio

from conveyor.domain.changes import (
    AnyKey,
    Applied,
    Change,
    Delete,
    Guard,
    Insert,
    Missing,
    Row,
    Stale,
    Update,
    Verdict,
    Write,
)
from conveyor.domain.damage import DamagedTask
from conveyor.engines.aws.client.retry import backoff_s
from conveyor.engines.aws.dynamodb import expressions
from conveyor.engines.aws.dynamodb.expressions import Params, codec_for, pointer_item
from conveyor.engines.aws.dynamodb.item_codec import Item
from conveyor.engines.aws.dynamodb.table import INVALID, ROUNDS_MAX, Table
from conveyor.engines.aws.errors import AwsError, NotApplied
from conveyor.ports.errors import Unavailable

Rows = dict[AnyKey, Any]


class ThrottledWrite(Unavailable):
    """A change of one write was throttled in every attempt. It wrote nothing."""


async def apply(table: Table, change: Change) -> Verdict:
    """Performs the writes of a change. The caller performs its effects."""
    steps = [step for write in change.writes for step in transaction_items(table.name, write)]
    for number in range(ROUNDS_MAX):
        if len(steps) == 1:
            try:
                rows = await _write_one(table, change.writes[0])
            except NotApplied as error:
                raise ThrottledWrite(str(error)) from error
            except AwsError as error:
                return await _refuse_damaged(table, change.writes[0], error)
        else:
            rows = await _write_all(table, change.writes, steps)
        if rows is not None:
            return Applied(tuple(rows))
        refusal = guard_holds(
            change.writes, await table.get_all([each.key for each in change.writes])
        )
        if refusal is not None:
            return refusal
        # Wait a random time: the writers that compete for the row would meet again otherwise.
        await trio.sleep(backoff_s(number, table.random))
    raise Unavailable("the rows of a change do not stand still")


async def _refuse_damaged(table: Table, write: Write, error: AwsError) -> Stale:
    """Returns Stale if the row is a damaged task, and raises `error` otherwise.

    DynamoDB refuses to add to an attribute that is not a number. Any other invalid write is a bug
    of this program.
    """
    row = await table.get(write.key) if error.code == INVALID else None
    if not isinstance(row, DamagedTask):
        raise error
    return Stale(write.key, row)


def guard_holds(writes: Sequence[Write], rows: Rows) -> Stale | Missing | None:
    """Returns why these writes are refused, given the current rows; None if all guards hold.

    Missing outranks Stale.
    """
    refusals = [no for each in writes if (no := _refusal(each, rows.get(each.key))) is not None]
    return next((no for no in refusals if isinstance(no, Missing)), next(iter(refusals), None))


def _refusal(write: Write, row: Any) -> Stale | Missing | None:
    match write:
        case Insert():
            expired_at = write.over_expired_at
            fits = row is None or (expired_at is not None and row.expires_at < expired_at)
        case Update():
            if row is None:
                return Missing(write.key)
            # The default that replaces a damaged field may pass the guard although the stored
            # value did not. The row is Stale in any case.
            fits = holds(write.guard, row) and not isinstance(row, DamagedTask)
        case Delete():
            fits = row is None or holds(write.guard, row)
        case _:
            assert_never(write)
    return None if fits else Stale(write.key, row)


def holds(guard: Guard, row: Any) -> bool:
    if guard.status_in is not None and row.status not in guard.status_in:
        return False
    if any(getattr(row, name) != value for name, value in guard.equals):
        return False
    if guard.at_least is not None and getattr(row, guard.at_least[0]) < guard.at_least[1]:
        return False
    if guard.lapsed is None:
        return True
    at = getattr(row, guard.lapsed[0])
    return at is not None and bool(at < guard.lapsed[1])


def transaction_items(table: str, write: Write) -> list[dict[str, Params]]:
    """Returns the steps of a write in a transaction: the write, and its pointer if it has one."""
    match write:
        case Insert():
            fields = msgspec.structs.asdict(write.row)
            steps = [{"Put": expressions.put(table, write)}]
        case Update():
            assert not write.values.keys() & write.deltas.keys()
            fields = write.values
            if fields or write.deltas:
                steps = [{"Update": expressions.update(table, write)}]
            else:
                steps = [{"ConditionCheck": expressions.check(table, write.key, write.guard)}]
        case Delete():
            return [{"Delete": expressions.delete(table, write)}]
        case _:
            assert_never(write)
    pointer = pointer_item(write.key, fields)
    return steps if pointer is None else [*steps, {"Put": {"TableName": table, "Item": pointer}}]


async def _write_one(table: Table, write: Write) -> list[Row | None] | None:
    match write:
        case Insert():
            done = await table.write("PutItem", expressions.put(table.name, write))
            return None if done is None else [write.row]
        case Delete():
            done = await table.write("DeleteItem", expressions.delete(table.name, write))
            return None if done is None else [None]
        case Update():
            return await _update_one(table, write)
        case _:
            assert_never(write)


async def _update_one(table: Table, write: Update) -> list[Row | None] | None:
    # An update without values only checks its guard. A consistent read is enough for that.
    if not write.values and not write.deltas:
        row = await table.get(write.key)
        return None if row is None or not holds(write.guard, row) else [row]
    params = expressions.update(table.name, write)
    # Quiet writes return nothing: their callers do not need the row.
    params["ReturnValues"] = "NONE" if write.is_quiet else "ALL_NEW"
    item: Item | None = await table.write("UpdateItem", params)
    if item is None:
        return None
    return [None if write.is_quiet else codec_for(write.key).from_item(item)]


async def _write_all(
    table: Table, writes: Sequence[Write], steps: Sequence[dict[str, Params]]
) -> list[Row | None] | None:
    if await table.write_together(steps) is not None:
        return None
    shown = [each.key for each in writes if isinstance(each, Update) and not each.is_quiet]
    rows = await table.get_all(shown) if shown else {}
    return [write.row if isinstance(write, Insert) else rows.get(write.key) for write in writes]
