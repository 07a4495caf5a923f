"""Tallies: settles of one shard in one transaction, with one write to their counter
(docs/engines.md, DynamoDB store).

Of a group that was cancelled the refused members are dropped and the others tried again, so that
one lost claim costs its neighbours a round and nothing else.
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

GROUP_MAX = 90

_TOO_LARGE = "ValidationException"

_Gate = tuple[AnyKey, Guard]
_Numbered = list[tuple[int, Change]]


async def apply_tallies(table: Table, changes: Sequence[Change]) -> list[Verdict]:
    """Performs changes that are all tallies. Their counters are shown as the call left them."""
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
    """One group after the other: at once they would only cancel each other."""
    refused: dict[int, Verdict] = {}
    for group in _grouped(tallies):
        refused |= await apply_or_split(table, group)
    return refused


async def apply_or_split(table: Table, group: _Numbered) -> dict[int, Verdict]:
    """Rows count towards 4 MB with all that they hold, which nobody knows before: a group that is
    refused as a whole is tried in halves."""
    try:
        return await _apply_group(table, group)
    except AwsError as error:
        if error.code != _TOO_LARGE or len(group) == 1:
            raise
    half = len(group) // 2
    refused = await apply_or_split(table, group[:half])
    return refused | await apply_or_split(table, group[half:])


def _shown_keys(changes: Iterable[Change]) -> list[AnyKey]:
    """Of all that was written, what the caller is shown: counters, and flips that are not quiet."""
    return [
        write.key
        for change in changes
        for write in (_flip(change), _count(change))
        if not write.is_quiet
    ]


def _verdict(change: Change, shown: dict[AnyKey, Any]) -> Verdict:
    # Only a scrub removes rows, and by then nobody waits for the answer.
    counter_key = _count(change).key
    if counter_key not in shown:
        return Missing(counter_key)
    return Applied((shown.get(_flip(change).key), shown[counter_key]))


def _grouped(tallies: _Numbered) -> list[_Numbered]:
    """Groups in order, of one gate each, and with no row twice."""
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
    """Performs those of a group that can be; answers what is wrong with the others."""
    refused: dict[int, Verdict] = {}
    left = list(group)
    for round_number in range(ROUNDS_MAX):
        failed = await table.write_together(_steps(table.name, [change for _, change in left]))
        if failed is None:
            return refused
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
        if not refused:
            await trio.sleep(backoff_s(round_number, table.random))
    raise Unavailable("settles that others keep changing")


def _steps(table: str, changes: Sequence[Change]) -> list[dict[str, Params]]:
    """The flips in order, and the counter at the end."""
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
