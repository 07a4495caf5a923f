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

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
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
    SettleChange,
    Stale,
    Update,
    Verdict,
    Write,
    find_refusal,
    holds,
)
from conveyor.domain.damage import DamagedTask
from conveyor.engines.aws.client.client import backoff_s
from conveyor.engines.aws.dynamodb.items import (
    Item,
    Params,
    check_params,
    codec_for,
    delete_params,
    pointer_item,
    put_params,
    update_params,
)
from conveyor.engines.aws.dynamodb.table import INVALID, ROUNDS_MAX, Table
from conveyor.engines.aws.errors import AwsError, NotApplied
from conveyor.engines.aws.gather import gather
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
        rows_now = await table.get_all([write.key for write in change.writes])
        refusal = find_refusal(change.writes, rows_now)
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


def transaction_items(table: str, write: Write) -> list[dict[str, Params]]:
    """Returns the steps of a write in a transaction: the write, and its pointer if it has one."""
    match write:
        case Insert():
            fields = msgspec.structs.asdict(write.row)
            steps = [{"Put": put_params(table, write)}]
        case Update():
            assert not write.values.keys() & write.deltas.keys()
            fields = write.values
            if fields or write.deltas:
                steps = [{"Update": update_params(table, write)}]
            else:
                steps = [{"ConditionCheck": check_params(table, write.key, write.guard)}]
        case Delete():
            return [{"Delete": delete_params(table, write)}]
        case _:
            assert_never(write)
    pointer = pointer_item(write.key, fields)
    return steps if pointer is None else [*steps, {"Put": {"TableName": table, "Item": pointer}}]


async def _write_one(table: Table, write: Write) -> list[Row | None] | None:
    match write:
        case Insert():
            done = await table.write("PutItem", put_params(table.name, write))
            return None if done is None else [write.row]
        case Delete():
            done = await table.write("DeleteItem", delete_params(table.name, write))
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
    params = update_params(table.name, write)
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
    updated = [write.key for write in writes if isinstance(write, Update) and not write.is_quiet]
    rows = await table.get_all(updated) if updated else {}
    return [write.row if isinstance(write, Insert) else rows.get(write.key) for write in writes]


# The settle batch: settles of one shard share a transaction and one write to their counter row.
#
# The problem: a settle ends a task and counts it, and both must commit together (decision 0002). As
# a transaction of its own it writes two rows at 2 write units each, and all settles of a shard
# write the same counter row, so concurrent transactions of a shard cancel one another.
#
# A batch puts up to `GROUP_MAX` settles of one shard into one transaction: the flips, which end the
# tasks, and one update that adds the sum of the counts. The counter row then costs 2 units per
# group instead of 2 units per settle. Groups of one shard run one after the other; shards run
# concurrently.
#
# The alternatives that decision 0002 rejected are counters that are computed from the task rows on
# every read (too expensive for a million tasks) and counters that a background job repairs (wrong
# in between).
#
# A transaction is cancelled as a whole if one condition fails. Then the batch reads the rows of the
# failed steps, drops the settles whose guards no longer hold, and tries the others again. So a lost
# claim costs the other settles of its group one more round and nothing else.


# DynamoDB allows 100 items per transaction (`ATOMIC_MAX`), and one of them is the counter row. A
# larger group saves little more; a smaller one pays for the counter row more often.
GROUP_MAX = 90

# DynamoDB's code for a transaction over 4 MB. It has other causes too, so a single settle that gets
# it raises it.
_TOO_LARGE = "ValidationException"

_Gate = tuple[AnyKey, Guard]
_Numbered = list[tuple[int, SettleChange]]


async def apply_settles(table: Table, settles: Sequence[SettleChange]) -> list[Verdict]:
    """Applies settles. Returns the counters as they are after the whole call."""
    by_counter: defaultdict[AnyKey, _Numbered] = defaultdict(list)
    for number, settle in enumerate(settles):
        by_counter[settle.count.key].append((number, settle))
    refused: dict[int, Verdict] = {}
    for refused_in_shard in await gather(partial(_apply_shard, table), list(by_counter.values())):
        refused |= refused_in_shard
    applied = {n: settle for n, settle in enumerate(settles) if n not in refused}
    rows = await table.get_all(_returned_keys(applied.values())) if applied else {}
    return [_verdict(applied[n], rows) if n in applied else refused[n] for n in range(len(settles))]


async def _apply_shard(table: Table, settles: _Numbered) -> dict[int, Verdict]:
    """Applies the groups of one shard one after the other.

    All of them write the same counter row, so concurrent transactions would cancel one another.
    """
    refused: dict[int, Verdict] = {}
    for group in _split_groups(settles):
        refused |= await apply_or_split(table, group)
    return refused


async def apply_or_split(table: Table, group: _Numbered) -> dict[int, Verdict]:
    """Applies a group, and splits it in halves if DynamoDB refuses it as too large.

    A transaction may have 4 MB. The stored size of each row counts, and the store does not know
    that size before.
    """
    try:
        return await _apply_group(table, group)
    except AwsError as error:
        if error.code != _TOO_LARGE or len(group) == 1:
            raise
    half = len(group) // 2
    refused = await apply_or_split(table, group[:half])
    return refused | await apply_or_split(table, group[half:])


def _returned_keys(settles: Iterable[SettleChange]) -> list[AnyKey]:
    """Returns the keys of the rows that callers receive: counters, and flips that are not quiet."""
    return [
        write.key
        for settle in settles
        for write in (settle.flip, settle.count)
        if not write.is_quiet
    ]


def _verdict(settle: SettleChange, rows: dict[AnyKey, Any]) -> Verdict:
    if settle.count.is_quiet:
        return Applied((rows.get(settle.flip.key), None))
    # The counter row was written a moment ago. Only a deletion of the run can have removed it, and
    # then the run has no more callers.
    if settle.count.key not in rows:
        return Missing(settle.count.key)
    return Applied((rows.get(settle.flip.key), rows[settle.count.key]))


def _split_groups(settles: _Numbered) -> list[_Numbered]:
    """Splits settles into groups, in order.

    A group has one gate (counter row and guard), because its counts are one update. It contains no
    row twice, because DynamoDB refuses such a transaction.
    """
    groups: list[_Numbered] = []
    gate: _Gate | None = None
    keys: set[AnyKey] = set()
    for number, settle in settles:
        flip, count = settle.flip, settle.count
        if gate != (count.key, count.guard) or flip.key in keys or len(keys) == GROUP_MAX:
            groups.append([])
            gate, keys = (count.key, count.guard), set()
        groups[-1].append((number, settle))
        keys.add(flip.key)
    return groups


async def _apply_group(table: Table, group: _Numbered) -> dict[int, Verdict]:
    """Applies the settles of a group that can be applied. Returns the verdicts of the others."""
    refused: dict[int, Verdict] = {}
    left = list(group)
    for round_number in range(ROUNDS_MAX):
        failed = await table.write_together(_steps(table.name, [settle for _, settle in left]))
        if failed is None:
            return refused
        # The counter is the last step. If its condition failed, the gate is closed for all.
        suspects = left if len(left) in failed else [left[at] for at in failed]
        keys = [write.key for _, settle in suspects for write in settle.writes]
        rows = await table.get_all(keys)
        for number, settle in suspects:
            refusal = find_refusal(settle.writes, rows)
            if refusal is not None:
                refused[number] = refusal
        left = [(number, settle) for number, settle in left if number not in refused]
        if not left:
            return refused
        # No guard fails any more: another writer changed a row meanwhile. Wait before the next try.
        if not refused:
            await trio.sleep(backoff_s(round_number, table.random))
    raise Unavailable("settles that others keep changing")


def _steps(table: str, settles: Sequence[SettleChange]) -> list[dict[str, Params]]:
    """Returns the steps of the transaction: the flips in order, then the counter."""
    total: Counter[str] = Counter()
    for settle in settles:
        total.update(settle.count.deltas)
    deltas = {name: delta for name, delta in total.items() if delta}
    summed = msgspec.structs.replace(settles[0].count, deltas=deltas)
    writes = [*(settle.flip for settle in settles), summed]
    steps = [step for write in writes for step in transaction_items(table, write)]
    assert len(steps) == len(writes), "a flip that moves a pointer"
    return steps
