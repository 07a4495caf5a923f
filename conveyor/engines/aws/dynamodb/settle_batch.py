"""The settle batch: settles of one shard share a transaction and one write to their counter row
(docs/engines.md, DynamoDB store).

The problem: a settle ends a task and counts it, and both must commit together (decision 0002). As a
transaction of its own it writes two rows at 2 write units each, and all settles of a shard write
the same counter row, so concurrent transactions of a shard cancel one another.

This module puts up to `GROUP_MAX` settles of one shard into one transaction: the flips, which end
the tasks, and one update that adds the sum of the counts. The counter row then costs 2 units per
group instead of 2 units per settle. Groups of one shard run one after the other; shards run
concurrently.

The alternatives that decision 0002 rejected are counters that are computed from the task rows on
every read (too expensive for a million tasks) and counters that a background job repairs (wrong in
between).

A transaction is cancelled as a whole if one condition fails. Then the batch reads the rows of the
failed steps, drops the settles whose guards no longer hold, and tries the others again. So a lost
claim costs the other settles of its group one more round and nothing else.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import trio

from conveyor.domain.changes import AnyKey, Applied, Change, Guard, Missing, Update, Verdict
from conveyor.engines.aws.client.retry import backoff_s
from conveyor.engines.aws.dynamodb.expressions import Params
from conveyor.engines.aws.dynamodb.gather import gather
from conveyor.engines.aws.dynamodb.table import ROUNDS_MAX, Table
from conveyor.engines.aws.dynamodb.transactions import guard_holds, transaction_items
from conveyor.engines.aws.errors import AwsError
from conveyor.ports.errors import Unavailable

# DynamoDB allows 100 items per transaction (`ATOMIC_MAX`), and one of them is the counter row. A
# larger group saves little more; a smaller one pays for the counter row more often.
GROUP_MAX = 90

# DynamoDB's code for a transaction over 4 MB. It has other causes too, so a single settle that gets
# it raises it.
_TOO_LARGE = "ValidationException"

_Gate = tuple[AnyKey, Guard]
_Numbered = list[tuple[int, Change]]


async def apply_tallies(table: Table, changes: Sequence[Change]) -> list[Verdict]:
    """Applies changes that are all tallies. Returns counters as they are after the whole call."""
    by_counter: defaultdict[AnyKey, _Numbered] = defaultdict(list)
    for number, change in enumerate(changes):
        by_counter[_count(change).key].append((number, change))
    refused: dict[int, Verdict] = {}
    for some in await gather(partial(_apply_shard, table), list(by_counter.values())):
        refused |= some
    applied = {n: change for n, change in enumerate(changes) if n not in refused}
    shown = await table.get_all(_shown_keys(applied.values())) if applied else {}
    return [
        _verdict(applied[n], shown) if n in applied else refused[n] for n in range(len(changes))
    ]


async def _apply_shard(table: Table, tallies: _Numbered) -> dict[int, Verdict]:
    """Applies the groups of one shard one after the other.

    All of them write the same counter row, so concurrent transactions would cancel one another.
    """
    refused: dict[int, Verdict] = {}
    for group in _grouped(tallies):
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


def _shown_keys(changes: Iterable[Change]) -> list[AnyKey]:
    """Returns the keys of the rows that callers receive: counters, and flips that are not quiet."""
    return [
        write.key
        for change in changes
        for write in (_flip(change), _count(change))
        if not write.is_quiet
    ]


def _verdict(change: Change, shown: dict[AnyKey, Any]) -> Verdict:
    # The counter row was written a moment ago. Only a deletion of the run can have removed it, and
    # then the run has no more callers.
    counter_key = _count(change).key
    if counter_key not in shown:
        return Missing(counter_key)
    return Applied((shown.get(_flip(change).key), shown[counter_key]))


def _grouped(tallies: _Numbered) -> list[_Numbered]:
    """Splits settles into groups, in order.

    A group has one gate (counter row and guard), because its counts are one update. It contains no
    row twice, because DynamoDB refuses such a transaction.
    """
    groups: list[_Numbered] = []
    gate: _Gate | None = None
    keys: set[AnyKey] = set()
    for number, change in tallies:
        flip, count = change.writes
        assert isinstance(count, Update)
        if gate != (count.key, count.guard) or flip.key in keys or len(keys) == GROUP_MAX:
            groups.append([])
            gate, keys = (count.key, count.guard), set()
        groups[-1].append((number, change))
        keys.add(flip.key)
    return groups


async def _apply_group(table: Table, group: _Numbered) -> dict[int, Verdict]:
    """Applies the settles of a group that can be applied. Returns the verdicts of the others."""
    refused: dict[int, Verdict] = {}
    left = list(group)
    for round_number in range(ROUNDS_MAX):
        failed = await table.write_together(_steps(table.name, [change for _, change in left]))
        if failed is None:
            return refused
        # The counter is the last step. If its condition failed, the gate is closed for all.
        suspects = left if len(left) in failed else [left[at] for at in failed]
        keys = [write.key for _, change in suspects for write in change.writes]
        rows = await table.get_all(keys)
        for number, change in suspects:
            verdict = guard_holds(change.writes, rows)
            if verdict is not None:
                refused[number] = verdict
        left = [each for each in left if each[0] not in refused]
        if not left:
            return refused
        # No guard fails any more: another writer changed a row meanwhile. Wait before the next try.
        if not refused:
            await trio.sleep(backoff_s(round_number, table.random))
    raise Unavailable("settles that others keep changing")


def _steps(table: str, changes: Sequence[Change]) -> list[dict[str, Params]]:
    """Returns the steps of the transaction: the flips in order, then the counter."""
    total: Counter[str] = Counter()
    for change in changes:
        total.update(_count(change).deltas)
    count = _count(changes[0])
    deltas = {name: delta for name, delta in total.items() if delta}
    summed = Update(count.key, count.guard, {}, deltas)
    writes = [*map(_flip, changes), summed]
    steps = [step for write in writes for step in transaction_items(table, write)]
    assert len(steps) == len(writes), "a flip that moves a pointer"
    return steps


def _flip(change: Change) -> Update:
    flip = change.writes[0]
    assert isinstance(flip, Update)
    return flip


def _count(change: Change) -> Update:
    count = change.writes[1]
    assert isinstance(count, Update)
    return count
