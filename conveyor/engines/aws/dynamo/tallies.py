"""Tallies: settles of one shard in one transaction, with one write to their counter (SPEC 5.10).

Of a group that was cancelled the refused members are dropped and the others tried again, so that
one lost claim costs its neighbours a round and nothing else.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial

import trio

from conveyor.domain.changes import AnyKey, Applied, Change, Guard, Missing, Update, Verdict
from conveyor.engines.aws.dynamo.commits import judge, steps_of
from conveyor.engines.aws.dynamo.expressions import Params
from conveyor.engines.aws.dynamo.table import ROUNDS_MAX, Table
from conveyor.engines.aws.dynamo.together import together
from conveyor.engines.aws.retrying import backoff_s
from conveyor.ports.errors import Unavailable

GROUP_MAX = 90

_Gate = tuple[AnyKey, Guard]
_Numbered = list[tuple[int, Change]]


async def apply_tallies(table: Table, changes: Sequence[Change]) -> list[Verdict]:
    """Performs changes that are all tallies. Their counters are shown as the call left them."""
    by_counter: defaultdict[AnyKey, _Numbered] = defaultdict(list)
    for number, change in enumerate(changes):
        by_counter[change.writes[1].key].append((number, change))
    verdicts: dict[int, Verdict] = {}
    await together(partial(_apply_shard, table, verdicts), list(by_counter.items()))
    return [verdicts[number] for number in range(len(changes))]


async def _apply_shard(
    table: Table, verdicts: dict[int, Verdict], shard: tuple[AnyKey, _Numbered]
) -> None:
    """One group after the other: at once they would only cancel each other."""
    counter_key, tallies = shard
    applied: list[int] = []
    for group in _grouped(tallies):
        refused = await _apply_group(table, group)
        verdicts.update(refused)
        applied += [number for number, _ in group if number not in refused]
    if applied:
        counter = await table.get(counter_key)
        # Only a scrub removes counters, and by then nobody waits for the answer.
        answer: Verdict = Missing(counter_key) if counter is None else Applied((None, counter))
        shown = dict(tallies)
        loud = [n for n in applied if not _flip(shown[n]).is_quiet]
        rows = await table.get_all([_flip(shown[n]).key for n in loud]) if loud else {}
        for number in applied:
            key = _flip(shown[number]).key
            verdicts[number] = Applied((rows[key], counter)) if number in loud else answer


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
            verdict = judge(change.writes, rows)
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
    steps = [step for write in writes for step in steps_of(table, write)]
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
