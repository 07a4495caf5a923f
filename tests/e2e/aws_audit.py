"""Audits the AWS engine without the program: reads table, bucket and Redis, and checks that rows,
counters and bodies agree. It knows only the layout of docs/storage.md, DynamoDB table."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import trio

from conveyor.ports.errors import BlobMissing
from tests.aws import an_access, an_aws_client, an_http_transport
from tests.e2e.cloud import Cloud
from tests.servers import redis_says

Row = dict[str, Any]
TERMINAL = ("successful", "failed")
COUNTED = ("admitted", "done", *TERMINAL)


def violations(cloud: Cloud) -> list[str]:
    """Returns every violated invariant of a deployment's rows and bodies."""
    return trio.run(_violations, cloud)


def rows_of(cloud: Cloud, kind: str) -> list[Row]:
    """Returns every row of a kind, which is the start of its sort key."""
    return trio.run(_rows_of, cloud, kind)


def leases_of(cloud: Cloud, job_id: str) -> set[str]:
    """Returns the names of a job's leases that have not expired."""
    port = int(cloud.environ["CONVEYOR_REDIS_URL"].rpartition(":")[2])
    key = f"{cloud.environ['CONVEYOR_TABLE']}:{{{job_id}}}/:leases"
    reply = redis_says(port, "ZRANGEBYSCORE", key, f"{time.time() * 1e6:.0f}", "+inf")
    return {name.decode() for name in re.findall(rb"\w{26}/(\w{24})", reply)}


async def _rows_of(cloud: Cloud, kind: str) -> list[Row]:
    return [row for row in await _scan(cloud) if row["sk"].partition("#")[0] == kind]


async def _scan(cloud: Cloud) -> list[Row]:
    rows: list[Row] = []
    async with an_http_transport(
        an_access(dynamodb=cloud.environ["AWS_ENDPOINT_URL_DYNAMODB"])
    ) as transport:
        params: Row = {"TableName": cloud.environ["CONVEYOR_TABLE"], "ConsistentRead": True}
        while True:
            answer = await an_aws_client(transport).call("dynamodb", "Scan", params)
            rows += [_plain(item) for item in answer["Items"]]
            if not answer.get("LastEvaluatedKey"):
                return rows
            params["ExclusiveStartKey"] = answer["LastEvaluatedKey"]


def _plain(item: Mapping[str, Mapping[str, Any]]) -> Row:
    row: Row = {}
    for name, attribute in item.items():
        ((kind, value),) = attribute.items()
        row[name] = float(value) if kind == "N" else None if kind == "NULL" else value
    return row


async def _violations(cloud: Cloud) -> list[str]:
    rows = await _scan(cloud)
    problems: list[str] = []
    for run in rows:
        if run["sk"].startswith("Run#"):
            problems += _of_run(run, rows)
    return [*problems, *_of_jobs(rows), *await _of_bodies(cloud, rows)]


def _of_run(run: Row, rows: list[Row]) -> list[str]:
    run_id, deleted = run["run_id"], run["status"] == "deleted"
    if deleted:
        return []
    tasks = [row for row in rows if row["sk"].startswith(f"Task#{run_id}#")]
    stats = [row for row in rows if row["sk"] == f"Stats#{run_id}"]
    statuses = Counter(task["status"] for task in tasks)
    counts = {name: sum(row.get(name, 0) for row in stats) for name in COUNTED}
    done = sum(statuses[status] for status in TERMINAL)
    facts = {
        "admitted = rows": counts["admitted"] == len(tasks),
        "done = terminal rows": counts["done"] == done,
        "successful = rows": counts["successful"] == statuses["successful"],
        "failed = rows": counts["failed"] == statuses["failed"],
        "done <= planned": done <= run.get("planned", 0),
        "one row a line": len({(task["batch_id"], task["index"]) for task in tasks}) == len(tasks),
        "a task has one outcome": all(_outcomes(task) <= 1 for task in tasks),
    }
    if run["status"] == "completed":
        facts["completed: every line is terminal"] = done == run["total"] == run["planned"]
        facts["completed: no batch is open"] = not run.get("open_batches")
    return [f"run {run_id}: {fact} does not hold" for fact, holds in facts.items() if not holds]


def _outcomes(task: Row) -> int:
    """Returns how many attempts in the task's history were successful."""
    return sum(
        len(attempt) < 4 or attempt[3] is None for attempt in json.loads(task.get("history", "[]"))
    )


def _of_jobs(rows: list[Row]) -> list[str]:
    """Checks that the active run of each job is its only live run."""
    problems = []
    runs = {row["run_id"]: row for row in rows if row["sk"].startswith("Run#")}
    for job in rows:
        if job["sk"] != "Job" or job["status"] == "deleted":
            continue
        active = runs.get(job.get("active_run_id"))
        live = [
            run
            for run in runs.values()
            if run["job_id"] == job["job_id"] and run["status"] in {"running", "pending"}
        ]
        if live != ([active] if active else []):
            problems.append(f"job {job['job_id']}: its live run is not its active one")
    return problems


def _place_of(key: str) -> dict[str, str]:
    """Returns the object of a body, and its range if it is a part of a pack."""
    part = re.fullmatch(r"(.+/pack\.[0-9a-f]+)\.(\d+)\.(\d+)", key)
    if part is None:
        return {"Key": key}
    first, size_bytes = int(part[2]), int(part[3])
    return {"Key": part[1], "Range": f"bytes={first}-{first + size_bytes - 1}"}


async def _of_bodies(cloud: Cloud, rows: list[Row]) -> list[str]:
    problems: list[str] = []
    visible = {r["run_id"] for r in rows if r["sk"].startswith("Run#") and r["status"] != "deleted"}
    async with an_http_transport(an_access(s3=cloud.environ["AWS_ENDPOINT_URL_S3"])) as transport:
        client = an_aws_client(transport)
        for row in rows:
            if not row["sk"].startswith("Task#") or row["status"] != "successful":
                continue
            if row["run_id"] not in visible:
                continue
            key, size_bytes, sha256, *_ = json.loads(row["result"])
            at = {"Bucket": cloud.environ["CONVEYOR_BUCKET"], **_place_of(key)}
            try:
                body = (await client.call("s3", "GetObject", at))["Body"]
            except BlobMissing:
                body = b""
            if len(body) != size_bytes or hashlib.sha256(body).hexdigest() != sha256:
                problems.append(
                    f"task {row['task_id']}: its body is missing or not what was stored"
                )
    return problems
