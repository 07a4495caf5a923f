"""Hypothesis strategies for requests to DynamoDB as the engine makes them, over a few items."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from conveyor.engines.aws.dynamodb.table import insert_statement

TABLE = "rows"
Params = dict[str, Any]
Call = tuple[str, Params]

partitions = st.sampled_from(["p0", "p0", "p1"])
sorts = st.sampled_from(["Task#a", "Task#b", "Run#a"])
keys = st.builds(lambda pk, sk: {"pk": {"S": pk}, "sk": {"S": sk}}, partitions, sorts)
bounds = st.sampled_from(["1", "2"])
numbers = st.sampled_from(["1", "1.0", "2", "-3", "1700000000.25", "1e3", "007"])
statuses = st.sampled_from(["waiting", "running", "ended"])
values = st.one_of(
    numbers.map(lambda text: {"N": text}),
    statuses.map(lambda text: {"S": text}),
    st.booleans().map(lambda value: {"BOOL": value}),
    st.just({"NULL": True}),
    st.just({"L": [{"S": "x"}, {"N": "1.50"}]}),
)
fields = st.fixed_dictionaries(
    {
        "status": statuses.map(lambda text: {"S": text}),
        "expires_at": bounds.map(lambda text: {"N": text}),
    },
    optional={
        "claim": numbers.map(lambda text: {"N": text}),
        "note": values,
        "g1": partitions.map(lambda text: {"S": text}),
        "g1s": sorts.map(lambda text: {"S": text}),
    },
)
items = st.builds(lambda key, more: {**key, **more}, keys, fields)


@st.composite
def conditions(draw: st.DrawFn) -> Params:
    """Draws a condition with its names and values; sometimes none."""
    value = {":c": {"N": draw(bounds)}}
    samples = {":s0": {"S": draw(statuses)}, ":s1": {"S": draw(statuses)}}
    claim, state = {"#claim": "claim"}, {"#status": "status"}
    text, names, expression_values = draw(
        st.sampled_from(
            [
                ("", {}, {}),
                ("attribute_exists(pk)", {}, {}),
                ("attribute_not_exists(pk)", {}, {}),
                ("attribute_not_exists(pk) OR expires_at <= :c", {}, value),
                ("attribute_exists(pk) AND #status IN (:s0, :s1)", state, samples),
                ("attribute_exists(pk) AND #claim = :c", claim, value),
                (
                    "attribute_exists(pk) AND (attribute_not_exists(#claim) OR #claim = :c)",
                    claim,
                    value,
                ),
                ("attribute_exists(pk) AND #claim < :c", claim, value),
                ("attribute_exists(pk) AND #claim >= :c", claim, value),
                (
                    "(attribute_not_exists(claim) OR claim <> :c) AND attribute_exists(pk)",
                    {},
                    value,
                ),
                ("#claim = :c AND expires_at > :c", claim, value),
            ]
        )
    )
    if not text:
        return {}
    params: Params = {"ConditionExpression": text}
    if names:
        params["ExpressionAttributeNames"] = dict(names)
    if expression_values:
        params["ExpressionAttributeValues"] = dict(expression_values)
    return params


@st.composite
def changes(draw: st.DrawFn) -> Params:
    """Draws an update as guards and writes produce it: every name is in one clause."""
    guard = draw(conditions())
    names = draw(
        st.lists(
            st.sampled_from(["status", "note", "expires_at", "g1", "g1s"]), min_size=1, unique=True
        )
    )
    clauses: dict[str, list[str]] = {"SET": [], "REMOVE": [], "ADD": []}
    expression_values = dict(guard.get("ExpressionAttributeValues", {}))
    for number, name in enumerate(names):
        if draw(st.booleans()):
            clauses["REMOVE"].append(f"#{name}")
        else:
            clauses["SET"].append(f"#{name} = :v{number}")
            expression_values[f":v{number}"] = draw(_of(name))
    if draw(st.booleans()):
        clauses["ADD"].append("#done :delta")
        names.append("done")
        expression_values[":delta"] = {"N": draw(numbers)}
    text = " ".join(f"{verb} {', '.join(parts)}" for verb, parts in clauses.items() if parts)
    used = {f"#{name}": name for name in names} | guard.get("ExpressionAttributeNames", {})
    params = {**guard, "UpdateExpression": text, "ExpressionAttributeNames": used}
    return (
        {**params, "ExpressionAttributeValues": expression_values} if expression_values else params
    )


def _of(name: str) -> st.SearchStrategy[Params]:
    match name:
        case "g1":
            return partitions.map(lambda text: {"S": text})
        case "status":
            return statuses.map(lambda text: {"S": text})
        case "g1s":
            return sorts.map(lambda text: {"S": text})
        case "expires_at":
            return numbers.map(lambda text: {"N": text})
        case _:
            return values


@st.composite
def steps(draw: st.DrawFn) -> Params:
    """Draws one step of a transaction."""
    kind = draw(st.sampled_from(["Put", "Update", "Delete", "ConditionCheck"]))
    at = {"TableName": TABLE}
    match kind:
        case "Put":
            return {kind: {**at, "Item": draw(items), **draw(conditions())}}
        case "Update":
            return {kind: {**at, "Key": draw(keys), **draw(changes())}}
        case "Delete":
            return {kind: {**at, "Key": draw(keys), **draw(conditions())}}
        case _:
            check = draw(conditions()) or {"ConditionExpression": "attribute_exists(pk)"}
            return {kind: {**at, "Key": draw(keys), **check}}


def _key_of(item: Params) -> tuple[str, str]:
    return item["pk"]["S"], item["sk"]["S"]


@st.composite
def calls(draw: st.DrawFn) -> Call:
    at: Params = {"TableName": TABLE}
    match draw(st.sampled_from(_VERBS)):
        case "put":
            return "PutItem", {**at, "Item": draw(items), **draw(conditions())}
        case "update":
            options = {"ReturnValues": draw(st.sampled_from(["NONE", "ALL_NEW"]))}
            return "UpdateItem", {**at, "Key": draw(keys), **draw(changes()), **options}
        case "delete":
            return "DeleteItem", {**at, "Key": draw(keys), **draw(conditions())}
        case "get":
            return "GetItem", {**at, "Key": draw(keys), "ConsistentRead": True}
        case "get many":
            sample_keys = draw(st.lists(keys, min_size=1, max_size=5))
            return "BatchGetItem", {"RequestItems": {TABLE: {"Keys": sample_keys}}}
        case "write many":
            puts = items.map(lambda item: {"PutRequest": {"Item": item}})
            removals = keys.map(lambda key: {"DeleteRequest": {"Key": key}})
            samples = draw(st.lists(st.one_of(puts, removals), min_size=1, max_size=5))
            return "BatchWriteItem", {"RequestItems": {TABLE: samples}}
        case "insert many":
            samples = draw(st.lists(items, min_size=1, max_size=5, unique_by=_key_of))
            return "BatchExecuteStatement", {
                "Statements": [insert_statement(TABLE, item) for item in samples]
            }
        case "together":
            samples = draw(st.lists(steps(), min_size=1, max_size=4))
            return "TransactWriteItems", {"TransactItems": samples}
        case "page":
            return "Query", draw(pages())
        case _:
            return "Query", draw(index_pages())


_VERBS = [
    *["put", "update", "update", "together"] * 2,
    *["get", "get many", "page", "index page"] * 2,
    *["delete", "write many", "insert many"],
]


@st.composite
def pages(draw: st.DrawFn) -> Params:
    first, last = sorted([draw(sorts), draw(sorts)])
    params: Params = {
        "TableName": TABLE,
        "KeyConditionExpression": "#pk = :pk AND #sk BETWEEN :first AND :last",
        "ExpressionAttributeNames": {"#pk": "pk", "#sk": "sk"},
        "ExpressionAttributeValues": {
            ":pk": {"S": draw(partitions)},
            ":first": {"S": first},
            ":last": {"S": last + "~"},
        },
        "ScanIndexForward": draw(st.booleans()),
        "ConsistentRead": True,
        "Limit": draw(st.integers(1, 4)),
    }
    if draw(st.booleans()):
        params["FilterExpression"] = "#status IN (:s0)"
        params["ExpressionAttributeNames"]["#status"] = "status"
        params["ExpressionAttributeValues"][":s0"] = {"S": draw(statuses)}
    return params


@st.composite
def index_pages(draw: st.DrawFn) -> Params:
    return {
        "TableName": TABLE,
        "IndexName": "GSI1",
        "KeyConditionExpression": "#pk = :pk AND #sk BETWEEN :first AND :last",
        "ExpressionAttributeNames": {"#pk": "g1", "#sk": "g1s"},
        "ExpressionAttributeValues": {
            ":pk": {"S": draw(partitions)},
            ":first": {"S": "R"},
            ":last": {"S": "~"},
        },
    }
