"""Behaviour of DynamoDB that no emulator shows: unprocessed items, conflicts, lost answers, late
indexes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import pytest
from trio.testing import MockClock

from conveyor.domain.changes import (
    ANY,
    Applied,
    Change,
    Enqueue,
    Guard,
    SettleChange,
    Stale,
    TaskKey,
    Update,
)
from conveyor.domain.ids import RunId
from conveyor.domain.model import RunStatus, ShardCounters, Task, TaskRef
from conveyor.domain.queries import DueExports, RunsIn, RunsOf, TasksOf
from conveyor.engines.aws.dynamodb import DynamoStore
from conveyor.engines.aws.dynamodb.items import pointer_item, to_item
from conveyor.engines.aws.dynamodb.table import Table
from conveyor.engines.aws.errors import AwsError, NoResponse, NotApplied
from conveyor.engines.memory import memory_engine
from conveyor.engines.memory.queue import MemoryQueue
from conveyor.ports.errors import PartlyUnavailable, Unavailable
from tests.aws import an_aws_client
from tests.builders import (
    JOB,
    RUN,
    ManualClock,
    a_change,
    a_job,
    a_run,
    a_stats,
    a_task,
    add,
    an_export,
    insert,
    key_of,
    ref_to,
    update,
)
from tests.engines.aws.scripted import LOST, THROTTLED, ScriptedAnswer, ScriptedTransport

NAME = "rows"


def cancelled(*reasons: str) -> AwsError:
    return AwsError("TransactionCanceledException", "cancelled", reasons=reasons)


FAILED, FINE, CONFLICT = "ConditionalCheckFailed", "None", "TransactionConflict"


def a_store(*lines: ScriptedAnswer) -> tuple[DynamoStore, ScriptedTransport, Table]:
    transport = ScriptedTransport(*lines)
    table = Table(name=NAME, client=an_aws_client(transport), random=Random(1))
    queue = memory_engine(clock=ManualClock(), random=Random(1)).queue
    return DynamoStore(table, queue), transport, table


def found(*items: Mapping[str, Any]) -> dict[str, Any]:
    return {"Responses": {NAME: list(items)}}


def operations(transport: ScriptedTransport) -> list[str]:
    return [operation for _, operation, _ in transport.asked]


def item_of(row: Any) -> dict[str, Any]:
    return to_item(key_of(row), row)


def a_settle(task: Task, stats: ShardCounters) -> Change:
    guard = Guard(equals=(("claim", 1),))
    flip = Update(key_of(task), guard, {"attempts": 1}, is_quiet=True)
    return SettleChange((flip, add(stats, done=1)))


async def test_settles_that_are_too_large_for_one_transaction_are_retried_in_halves() -> None:
    stats, tasks = a_stats(), [a_task(0), a_task(1)]
    too_large = AwsError("ValidationException", "Transaction request cannot exceed 4 MB")
    store, transport, _ = a_store(too_large, {}, {}, {"Item": item_of(stats)})

    verdicts = await store.commit([a_settle(task, stats) for task in tasks])

    assert all(isinstance(verdict, Applied) for verdict in verdicts)
    assert operations(transport) == ["TransactWriteItems"] * 3 + ["GetItem"]


async def test_unprocessed_keys_of_a_read_are_read_again(autojump_clock: MockClock) -> None:
    tasks = [a_task(0), a_task(1)]
    left = {NAME: {"Keys": [{name: item_of(tasks[1])[name] for name in ("pk", "sk")}]}}
    said = found(item_of(tasks[0])) | {"UnprocessedKeys": left}
    _, transport, table = a_store(said, found(item_of(tasks[1])))

    rows = await table.get_all([key_of(task) for task in tasks])

    assert rows == {key_of(task): task for task in tasks}
    assert operations(transport) == ["BatchGetItem"] * 2


async def test_unprocessed_deletions_are_repeated_a_bounded_number_of_times(
    autojump_clock: MockClock,
) -> None:
    request: dict[str, Any] = {"DeleteRequest": {"Key": {}}}
    left: ScriptedAnswer = {"UnprocessedItems": {NAME: [request]}}
    _, transport, table = a_store(left, left, {})
    _, _, stuck = a_store(left)

    await table.remove([("a", "b"), ("c", "d")])
    with pytest.raises(Unavailable):
        await stuck.remove([("a", "b")])

    assert [len(params["RequestItems"][NAME]) for _, _, params in transport.asked] == [2, 1, 1]


async def test_a_query_continues_after_empty_pages(autojump_clock: MockClock) -> None:
    task = a_task(0)
    more = {"Items": [], "ScannedCount": 1, "LastEvaluatedKey": {"pk": {"S": "x"}}}
    store, transport, table = a_store(more, more, {"Items": [item_of(task)], "ScannedCount": 1})

    rows = await store.find(TasksOf(job_id=JOB, run_id=RUN, shard_count=1, limit=5))

    assert rows == [task]
    assert operations(transport) == ["Query"] * 3
    assert [table.meter.rows_read, table.meter.rows_returned] == [3, 1]


async def test_a_conflicting_transaction_is_repeated_with_the_same_token(
    autojump_clock: MockClock,
) -> None:
    in_progress = AwsError("TransactionInProgressException", "wait")
    store, transport, _ = a_store(cancelled(CONFLICT, FINE), in_progress, LOST, {})

    verdicts = await store.commit([a_change(insert(a_job()), insert(a_task()))])

    assert verdicts == [Applied((a_job(), a_task()))]
    tokens = {params["ClientRequestToken"] for _, _, params in transport.asked}
    assert len(transport.asked) == 4
    assert len(tokens) == 1


async def test_a_lost_answer_does_not_affect_the_verdicts_of_the_other_changes() -> None:
    task = a_task()
    store, _, _ = a_store({"Attributes": item_of(task)}, LOST, {"Attributes": item_of(task)})

    with pytest.raises(PartlyUnavailable) as caught:
        await store.commit([a_change(update(a_task(n), attempts=1)) for n in range(3)])

    known = [verdict for verdict in caught.value.verdicts if verdict is not None]
    assert len(caught.value.verdicts) == 3
    assert known == [Applied((task,))] * 2


async def test_a_throttled_write_is_known_to_have_changed_nothing(
    autojump_clock: MockClock,
) -> None:
    store, _, _ = a_store(THROTTLED)

    with pytest.raises(PartlyUnavailable) as caught:
        await store.commit([a_change(update(a_task(n), attempts=1)) for n in range(2)])

    assert caught.value.verdicts == [None, None]
    assert caught.value.turned_away == {0, 1}


async def test_a_write_is_not_reported_as_undone_if_a_later_call_was_throttled(
    autojump_clock: MockClock,
) -> None:
    written_not_read, written_not_sent = a_store({}, THROTTLED)[0], a_store({})[2]
    several = SettleChange((update(a_task(), attempts=1), add(a_stats(), done=1)))
    sent = Change((insert(a_task()),), (Enqueue((ref_to(a_task()),)),))

    with pytest.raises(Unavailable) as unread:
        await written_not_read.commit([several])
    with pytest.raises(Unavailable) as unsent:
        await DynamoStore(written_not_sent, ThrottledQueue(ManualClock(), Random(1))).commit([sent])

    assert not isinstance(unread.value, PartlyUnavailable)
    assert not isinstance(unsent.value, PartlyUnavailable)


class ThrottledQueue(MemoryQueue):
    async def send(self, refs: Sequence[TaskRef]) -> None:
        raise NotApplied("sqs.SendMessageBatch: RequestThrottled")


class QueueRemovedOnOpen(MemoryQueue):
    """The runs have ended: each queue is removed as soon as it is opened."""

    async def open_run(self, run_id: RunId) -> None:
        await super().open_run(run_id)
        await self.close_run(run_id)


async def test_references_of_a_run_whose_queue_was_removed_are_not_sent() -> None:
    _, _, table = a_store({}, {"Attributes": {}})
    store = DynamoStore(table, QueueRemovedOnOpen(ManualClock(), Random(1)))
    change = Change((insert(a_task()),), (Enqueue((ref_to(a_task()),)),))

    with pytest.raises(Unavailable):
        await store.commit([change])


async def test_a_single_change_with_a_lost_answer_raises_unavailable() -> None:
    store, _, _ = a_store(LOST)

    with pytest.raises(Unavailable) as caught:
        await store.commit([a_change(update(a_task(), attempts=1))])

    assert not isinstance(caught.value, PartlyUnavailable)


async def test_the_same_change_committed_twice_has_two_tokens() -> None:
    store, transport, _ = a_store({})
    change = a_change(insert(a_job()), insert(a_task()))

    await store.commit([change])
    await store.commit([change])

    first, second = (params["ClientRequestToken"] for _, _, params in transport.asked)
    assert first != second


async def test_a_token_that_was_used_for_another_change_is_an_assertion_error() -> None:
    mismatch = AwsError("IdempotentParameterMismatchException", "no")
    store, _, _ = a_store(mismatch)

    with pytest.raises(AwsError):
        await store.commit([a_change(insert(a_job()), insert(a_task()))])


async def test_a_condition_that_failed_beside_a_conflict_is_reported_as_stale(
    autojump_clock: MockClock,
) -> None:
    job, closed = a_job(), Guard(status_in=frozenset({"closed"}))
    store, _, _ = a_store(cancelled(FAILED, CONFLICT), found(item_of(job)))

    verdicts = await store.commit([a_change(update(job, closed, name="x"), insert(a_task()))])

    assert verdicts == [Stale(key_of(job), job)]


async def test_a_refused_insert_is_repeated_if_its_row_does_not_exist_any_more(
    autojump_clock: MockClock,
) -> None:
    refused = AwsError("ConditionalCheckFailedException", "no")
    store, transport, _ = a_store(refused, {}, {})

    verdicts = await store.commit([a_change(insert(a_job()))])

    assert verdicts == [Applied((a_job(),))]
    assert operations(transport) == ["PutItem", "GetItem", "PutItem"]


async def test_a_lost_claim_costs_the_other_settles_of_its_group_one_round(
    autojump_clock: MockClock,
) -> None:
    tasks, stats = [a_task(n, claim=1) for n in range(3)], a_stats(done=5)
    lost = a_task(1, claim=2)
    store, transport, _ = a_store(
        cancelled(FINE, FAILED, FINE, FINE),
        found(item_of(lost), item_of(stats)),
        {},
        {"Item": item_of(stats)},
    )

    verdicts = await store.commit([a_settle(task, stats) for task in tasks])

    kept = Applied((None, stats))
    assert verdicts == [kept, Stale(key_of(lost), lost), kept]
    sizes = [len(params.get("TransactItems", ())) for _, _, params in transport.asked]
    assert sizes == [4, 0, 3, 0]
    again = transport.asked[2][2]["TransactItems"]
    assert again[-1]["Update"]["ExpressionAttributeValues"] == {":0": {"N": "2"}}


async def test_settles_of_one_shard_share_one_write_of_their_counters() -> None:
    stats = a_stats(done=95)
    store, transport, _ = a_store({}, {}, {"Item": item_of(stats)})

    await store.commit([a_settle(a_task(number, claim=1), stats) for number in range(95)])

    sizes = [len(params.get("TransactItems", ())) for _, _, params in transport.asked]
    assert sizes == [91, 6, 0]


@pytest.mark.parametrize("failure", [THROTTLED, LOST], ids=["throttled", "lost"])
async def test_a_claim_with_a_lost_answer_has_an_unknown_outcome(
    failure: AwsError | NoResponse, autojump_clock: MockClock
) -> None:
    store, _, _ = a_store(failure)

    with pytest.raises(Unavailable):
        await store.commit([a_change(add(a_task(), claim=1))])


async def test_an_outdated_index_entry_is_not_found(autojump_clock: MockClock) -> None:
    ended, gone = a_run(status=RunStatus.COMPLETED), a_run()
    shown = {"Items": [item_of(ended)], "ScannedCount": 1}
    nothing: list[ScriptedAnswer] = [{"Items": []}] * 7
    store, _, _ = a_store(shown, *nothing, found(item_of(ended)))
    other, _, _ = a_store({"Items": [item_of(gone)]}, *nothing, found())
    query = RunsIn(statuses=frozenset({RunStatus.RUNNING}), limit=10)

    assert await store.find(query) == []
    assert await other.find(query) == []


async def test_a_row_that_an_index_returns_twice_is_found_once(autojump_clock: MockClock) -> None:
    """A row that changes its index position during the query is returned at its old and its new
    position."""
    run = a_run(status=RunStatus.RUNNING)
    shown: ScriptedAnswer = {"Items": [item_of(run)], "ScannedCount": 1}
    nothing: list[ScriptedAnswer] = [{"Items": []}] * 7
    store, transport, _ = a_store(shown, *nothing, shown, *nothing, found(item_of(run)))
    statuses = frozenset({RunStatus.PENDING, RunStatus.RUNNING})

    rows = await store.find(RunsIn(statuses=statuses, limit=10))

    (asked,) = [params for _, name, params in transport.asked if name == "BatchGetItem"]
    assert rows == [run]
    assert len(asked["RequestItems"][NAME]["Keys"]) == 1


async def test_an_export_that_an_index_returns_twice_is_found_once(
    autojump_clock: MockClock,
) -> None:
    export = an_export()
    shown: ScriptedAnswer = {"Items": [item_of(export)] * 2, "ScannedCount": 2}
    store, _, _ = a_store(shown, {"Items": []}, found(item_of(export)))

    assert await store.find(DueExports(due_by=export.due_at, limit=10)) == [export]


async def test_a_query_removes_an_index_entry_without_its_row() -> None:
    run = a_run()
    pointer = pointer_item(key_of(run), {"sequence": run.sequence})
    store, transport, _ = a_store({"Items": [pointer]}, found(), {}, {"Items": []})

    rows = await store.find(RunsOf(job_id=JOB, statuses=frozenset(RunStatus), limit=5))

    assert rows == []
    assert operations(transport)[:3] == ["Query", "BatchGetItem", "BatchWriteItem"]


async def test_every_update_has_the_condition_that_its_row_exists() -> None:
    store, transport, _ = a_store({"Attributes": item_of(a_task())})

    await store.commit(
        [a_change(Update(TaskKey(JOB, RUN, a_task().task_id, 0), ANY, {"claim": 1}))]
    )

    assert transport.asked[0][2]["ConditionExpression"] == "attribute_exists(pk)"
