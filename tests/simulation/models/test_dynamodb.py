"""Tests the model of DynamoDB: its limits, and each of its faults."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from conveyor.engines.aws.dynamodb.table import insert_statement
from conveyor.engines.aws.errors import AwsError
from conveyor.simulation.models.dynamodb.values import NotModelled
from conveyor.simulation.models.fault_rates import CapacityLimits, DynamoFaults
from tests.simulation.models.worlds import TABLE, World, item, key

Params = dict[str, Any]


async def put(world: World, *items: Params) -> None:
    for row in items:
        await world.dynamodb("PutItem", TableName=TABLE, Item=row)


async def write_together(world: World, *items: Params, **more: Any) -> Params:
    steps = [{"Put": {"TableName": TABLE, "Item": item}} for item in items]
    return await world.dynamodb("TransactWriteItems", TransactItems=steps, **more)


async def page(world: World, **more: Any) -> Params:
    return await world.dynamodb(
        "Query",
        TableName=TABLE,
        KeyConditionExpression="pk = :pk",
        ExpressionAttributeValues={":pk": {"S": "p"}},
        **more,
    )


async def by_owner(world: World, owner: str) -> list[str]:
    """Returns the sort keys that the first index shows for an owner."""
    answer = await world.dynamodb(
        "Query",
        TableName=TABLE,
        IndexName="GSI1",
        KeyConditionExpression="g1 = :pk",
        ExpressionAttributeValues={":pk": {"S": owner}},
    )
    return [item["sk"]["S"] for item in answer["Items"]]


async def refusal(call: Any) -> tuple[str, tuple[str, ...]]:
    with pytest.raises(AwsError) as caught:
        await call
    return caught.value.code, caught.value.reasons


async def test_items_and_requests_beyond_the_limits_are_refused(world: World) -> None:
    large = item("a", text="x" * 400 * 1024)
    items = [item(str(number), text="x" * 300 * 1024) for number in range(14)]
    many = [item(str(number)) for number in range(101)]
    puts = [{"PutRequest": {"Item": row}} for row in many[:26]]

    for call in (
        put(world, large),
        write_together(world, *items),
        write_together(world, *many),
        write_together(world, many[0], many[0]),
        world.dynamodb("BatchWriteItem", RequestItems={TABLE: puts}),
        put(world, item("", text="x")),
        put(world, {**item("a"), "n": {"N": "NaN"}}),
        put(world, item("a", g1="")),
    ):
        assert await refusal(call) == ("ValidationException", ())


async def test_a_page_ends_at_a_megabyte(world: World) -> None:
    await put(world, *[item(str(number), text="x" * 300 * 1024) for number in range(5)])

    first = await page(world)
    rest = await page(world, ExclusiveStartKey=first["LastEvaluatedKey"])

    assert [first["Count"], rest["Count"]] == [4, 1]
    assert "LastEvaluatedKey" not in rest


async def test_a_token_identifies_one_transaction_for_ten_minutes(
    world: World, autojump_clock: MockClock
) -> None:
    guarded = {
        "Put": {
            "TableName": TABLE,
            "Item": item("a"),
            "ConditionExpression": "attribute_not_exists(pk)",
        }
    }
    once = {"TransactItems": [guarded], "ClientRequestToken": "t"}

    await world.dynamodb("TransactWriteItems", **once)
    await world.dynamodb("TransactWriteItems", **once)
    mismatch = await refusal(write_together(world, item("b"), ClientRequestToken="t"))
    await trio.sleep(601)
    late = await refusal(world.dynamodb("TransactWriteItems", **once))

    assert mismatch[0] == "IdempotentParameterMismatchException"
    assert late == ("TransactionCanceledException", ("ConditionalCheckFailed",))


async def test_an_operation_or_parameter_that_is_not_modelled_raises(world: World) -> None:
    at = {"TableName": TABLE, "Key": key("a")}

    for call in (
        world.dynamodb("Scan", TableName=TABLE),
        world.dynamodb("GetItem", **at, AttributesToGet=["x"]),
        world.dynamodb("UpdateItem", **at, UpdateExpression="SET a = if_not_exists(a, b)"),
        world.dynamodb("DeleteItem", **at, ConditionExpression="size(a) > a"),
        world.dynamodb("DeleteItem", **at, ConditionExpression="a.b = a"),
    ):
        with pytest.raises(NotModelled):
            await call


async def test_unused_names_and_values_are_refused(world: World) -> None:
    unused = {"TableName": TABLE, "Item": item("a"), "ExpressionAttributeNames": {"#a": "a"}}

    assert await refusal(world.dynamodb("PutItem", **unused)) == ("ValidationException", ())


async def test_consumed_capacity_is_reported_as_by_the_service(world: World) -> None:
    request = {"TableName": TABLE, "ReturnConsumedCapacity": "TOTAL"}
    large = item("a", text="x" * 3000, g1="o", g1s="s")

    wrote = await world.dynamodb("PutItem", **request, Item=large)
    read = await world.dynamodb("GetItem", **request, Key=key("a"))
    both = await write_together(world, item("b"), item("c"), ReturnConsumedCapacity="TOTAL")

    assert wrote["ConsumedCapacity"]["CapacityUnits"] == 4.0
    assert read["ConsumedCapacity"]["CapacityUnits"] == 0.5
    assert both["ConsumedCapacity"][0]["CapacityUnits"] == 4.0


@pytest.mark.slow
async def test_a_partition_accepts_a_thousand_writes_a_second(
    world: World, autojump_clock: MockClock
) -> None:
    world.set_faults(DynamoFaults(capacity=CapacityLimits()))
    taken, codes, start = 0, set(), trio.current_time()

    while trio.current_time() < start + 3.0:
        try:
            await put(world, item(str(taken)))
            taken += 1
        except AwsError as error:
            codes.add(error.code)
            await trio.sleep(0.01)

    assert codes == {"ProvisionedThroughputExceededException"}
    assert taken == pytest.approx(4000, rel=0.02)
    assert world.fault_source.fault_counts["dynamodb.throttled"] > 0


@pytest.mark.slow
async def test_a_cold_table_accepts_four_thousand_writes_a_second(
    world: World, autojump_clock: MockClock
) -> None:
    world.set_faults(DynamoFaults(capacity=CapacityLimits()))

    codes = set()
    for number in range(4100):
        try:
            await put(world, item("a", str(number)))
        except AwsError as error:
            codes.add(error.code)

    assert codes == {"ThrottlingException"}
    assert world.fault_source.fault_counts["dynamodb.throttled"] == 100


async def test_a_hot_partition_of_an_index_throttles_writes_to_the_table(
    world: World, autojump_clock: MockClock
) -> None:
    world.set_faults(DynamoFaults(capacity=CapacityLimits(partition_writes=10)))

    for number in range(10):
        await put(world, item("a", str(number), g1="hot", g1s=str(number)))

    refused = await refusal(put(world, item("a", "x", g1="hot", g1s="x")))
    await put(world, item("a", "x", g1="cold", g1s="x"))
    assert refused[0] == "ProvisionedThroughputExceededException"


async def test_reads_have_a_capacity_too(world: World, autojump_clock: MockClock) -> None:
    world.set_faults(DynamoFaults(capacity=CapacityLimits(partition_reads=10)))
    reads = {"TableName": TABLE, "Key": key("a"), "ConsistentRead": True}

    for _ in range(10):
        await world.dynamodb("GetItem", **reads)

    assert (await refusal(world.dynamodb("GetItem", **reads)))[0].startswith("Provisioned")


async def test_a_throttled_shard_does_not_throttle_other_shards(
    world: World, autojump_clock: MockClock
) -> None:
    world.set_faults(DynamoFaults(throttled_shard_rate=1.0, throttled_shard_s=(30.0, 30.0)))

    await refusal(put(world, item("a")))
    world.set_faults(DynamoFaults(throttled_shard_rate=1e-9))
    still = await refusal(put(world, item("a")))
    await put(world, item("a", "q"))
    await trio.sleep(30)
    await put(world, item("a"))

    assert still[0] == "ProvisionedThroughputExceededException"
    assert world.fault_source.fault_counts["dynamodb.throttled_shard"] == 1


async def test_a_part_of_a_batch_may_be_left_unprocessed(world: World) -> None:
    items = [item(str(number)) for number in range(25)]
    puts = [{"PutRequest": {"Item": row}} for row in items]
    keys = [key(str(number)) for number in range(25)]
    world.set_faults(DynamoFaults(unprocessed_rate=0.5))

    wrote = await world.dynamodb("BatchWriteItem", RequestItems={TABLE: puts})
    read = await world.dynamodb("BatchGetItem", RequestItems={TABLE: {"Keys": keys}})

    left = wrote["UnprocessedItems"][TABLE]
    unread = read["UnprocessedKeys"][TABLE]["Keys"]
    assert 0 < len(left) < 25
    assert all(put in puts for put in left)
    assert 0 < len(unread) < 25
    assert len(read["Responses"][TABLE]) <= 25 - len(unread)
    fault_counts = world.fault_source.fault_counts
    assert fault_counts["dynamodb.unprocessed_items"] == len(left)
    assert fault_counts["dynamodb.unprocessed_keys"] == len(unread)


async def test_each_statement_of_a_batch_succeeds_or_fails_alone(world: World) -> None:
    await put(world, item("old", n="1"))
    inserts = [insert_statement(TABLE, item(name, n="2")) for name in ("new", "old")]

    answer = await world.dynamodb(
        "BatchExecuteStatement", Statements=inserts, ReturnConsumedCapacity="TOTAL"
    )

    codes = [response.get("Error", {}).get("Code") for response in answer["Responses"]]
    assert codes == [None, "DuplicateItem"]
    assert answer["ConsumedCapacity"] == [{"CapacityUnits": 2.0}]
    kept = await world.dynamodb("GetItem", TableName=TABLE, Key=key("old"))
    assert kept["Item"]["n"] == {"S": "1"}


async def test_a_part_of_the_statements_may_be_throttled(world: World) -> None:
    inserts = [insert_statement(TABLE, item(str(number))) for number in range(25)]
    world.set_faults(DynamoFaults(unprocessed_rate=0.5))

    answer = await world.dynamodb("BatchExecuteStatement", Statements=inserts)

    codes = Counter(response.get("Error", {}).get("Code") for response in answer["Responses"])
    assert set(codes) == {None, "ThrottlingError"}
    assert (await page(world))["Count"] == codes[None]


@pytest.mark.parametrize("count", [0, 26])
async def test_a_batch_has_one_to_25_statements(world: World, count: int) -> None:
    inserts = [insert_statement(TABLE, item(str(number))) for number in range(count)]

    code, _ = await refusal(world.dynamodb("BatchExecuteStatement", Statements=inserts))

    assert code == "ValidationException"


async def test_a_batch_that_names_an_item_twice_is_refused(world: World) -> None:
    inserts = [insert_statement(TABLE, item("a"))] * 2

    code, _ = await refusal(world.dynamodb("BatchExecuteStatement", Statements=inserts))

    assert code == "ValidationException"


async def test_a_transaction_is_cancelled_by_a_conflict(world: World) -> None:
    world.set_faults(DynamoFaults(conflict_rate=1.0))

    code, reasons = await refusal(write_together(world, item("a"), item("b")))

    assert code == "TransactionCanceledException"
    assert sorted(reasons) == ["None", "TransactionConflict"]
    assert (await page(world))["Count"] == 0


async def test_a_transaction_conflicts_with_others_on_its_items_for_a_moment(
    world: World, autojump_clock: MockClock
) -> None:
    world.set_faults(DynamoFaults(conflict_s=1.0))
    await write_together(world, item("a"), item("b"))

    cancelled = await refusal(write_together(world, item("b"), item("c")))
    alone = await refusal(put(world, item("a")))
    await trio.sleep(1.0)
    await write_together(world, item("b"), item("c"))

    assert cancelled == ("TransactionCanceledException", ("TransactionConflict", "None"))
    assert alone[0] == "TransactionConflictException"
    assert world.fault_source.fault_counts["dynamodb.conflict"] == 2


async def test_a_repeated_transaction_may_be_reported_as_in_progress(world: World) -> None:
    world.set_faults(DynamoFaults(in_progress_rate=1.0))
    await write_together(world, item("a"), ClientRequestToken="t")

    again = await refusal(write_together(world, item("a"), ClientRequestToken="t"))

    assert again[0] == "TransactionInProgressException"


async def test_an_eventually_consistent_read_may_return_an_old_value(
    world: World, autojump_clock: MockClock
) -> None:
    world.set_faults(DynamoFaults(stale_read_rate=1.0))
    for number in range(6):
        await put(world, item("a", text=str(number)))
        await trio.sleep(1.0)
    request = {"TableName": TABLE, "Key": key("a")}

    seen = {(await world.dynamodb("GetItem", **request))["Item"]["text"]["S"] for _ in range(100)}
    texts = {(await page(world))["Items"][0]["text"]["S"] for _ in range(100)}
    sure = {
        (await world.dynamodb("GetItem", **request, ConsistentRead=True))["Item"]["text"]["S"]
        for _ in range(20)
    }

    assert {"2", "3", "4", "5"} <= seen & texts
    assert seen | texts <= {"0", "1", "2", "3", "4", "5"}
    assert sure == {"5"}


async def test_an_index_is_late_and_out_of_order_and_complete_in_the_end(
    world: World, autojump_clock: MockClock
) -> None:
    world.set_faults(DynamoFaults(late_index_rate=1.0))
    names = [f"{number:02}" for number in range(20)]
    for name in names:
        await put(world, item(name, g1="o", g1s=name))
    await put(world, item("00", g1="other", g1s="00"))

    at_once = await by_owner(world, "o")
    await trio.sleep(30)
    halfway = await by_owner(world, "o")
    await trio.sleep(60)

    assert at_once == []
    assert halfway not in (names[: len(halfway)], names[1 : len(halfway) + 1])
    assert await by_owner(world, "o") == names[1:]
    assert await by_owner(world, "other") == ["00"]
    assert world.fault_source.fault_counts["dynamodb.late_index"] >= 21


async def test_rows_expire_late_or_never(world: World, autojump_clock: MockClock) -> None:
    def dying(name: str) -> Params:
        return {**item(name), "ttl": {"N": str(int(world.clock.now()) + 10)}}

    await put(world, dying("prompt"))
    world.set_faults(DynamoFaults(late_expiry_rate=1.0, late_expiry_s=(3600.0, 3600.0)))
    await put(world, dying("late"))
    world.set_faults(DynamoFaults(never_expires_rate=1.0))
    await put(world, dying("never"))

    counts = []
    for wait_s in (0, 20, 4000, 1e6):
        await trio.sleep(wait_s)
        counts.append((await page(world))["Count"])

    assert counts == [3, 2, 1, 1]


async def test_a_row_exists_at_the_instant_of_its_expiry(
    world: World, autojump_clock: MockClock
) -> None:
    expires_at = int(world.clock.now()) + 10
    await put(world, {**item("a"), "ttl": {"N": str(expires_at)}})

    await trio.sleep(expires_at - world.clock.now())
    assert world.clock.now() == expires_at
    counts = [(await page(world))["Count"]]
    await trio.sleep(1)
    counts.append((await page(world))["Count"])

    assert counts == [1, 0]


async def test_a_row_whose_expiry_was_extended_stays(
    world: World, autojump_clock: MockClock
) -> None:
    for life_s in (10, 100):
        until = {"N": str(int(world.clock.now()) + life_s)}
        await put(world, {**item("a"), "ttl": until})

    await trio.sleep(50)
    before = (await page(world))["Count"]
    await trio.sleep(100)

    assert [before, (await page(world))["Count"]] == [1, 0]


@pytest.mark.parametrize("is_forward", [True, False])
async def test_short_and_empty_pages_lose_no_row(world: World, *, is_forward: bool) -> None:
    names = [f"{number:02}" for number in range(30)]
    await put(world, *map(item, names))
    world.set_faults(DynamoFaults(short_page_rate=0.95))

    sizes: list[int] = []
    sort_keys: list[str] = []
    start: Params = {}
    while True:
        answer = await page(world, ScanIndexForward=is_forward, **start)
        sizes.append(answer["Count"])
        sort_keys += [row["sk"]["S"] for row in answer["Items"]]
        if "LastEvaluatedKey" not in answer:
            break
        start = {"ExclusiveStartKey": answer["LastEvaluatedKey"]}

    assert sort_keys == sorted(names, reverse=not is_forward)
    assert 0 in sizes
    assert world.fault_source.fault_counts["dynamodb.empty_page"] == sizes.count(0)
