"""`/metrics` covers what operators ask for, by the rules of Prometheus, with bounded labels."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from conveyor.telemetry import ActorFigures, EngineUsage, make_metrics
from tests.api.world import World
from tests.tidy.listings import SampleUsage
from tests.tidy.listings import metrics as metrics_table

# What an operator asks, and the metrics that answer it.
ANSWERS = {
    "outcomes by result and reason": ["conveyor_task_outcomes_total"],
    "backlog and oldest age": [
        "conveyor_tasks_unfinished",
        "conveyor_tasks_oldest_waiting_seconds",
    ],
    "runs by state": ["conveyor_runs_live"],
    "fetch time and bytes": ["conveyor_fetch_seconds", "conveyor_fetch_body_bytes_total"],
    "status classes": ["conveyor_fetch_responses_total"],
    "retries": ["conveyor_task_outcomes_total", "conveyor_engine_call_retries_total"],
    "leases and slots": [
        "conveyor_leases_held",
        "conveyor_leases_lost_total",
        "conveyor_slots",
        "conveyor_slots_usable",
        "conveyor_tasks_inflight",
    ],
    "webhook deliveries": ["conveyor_webhook_deliveries_total"],
    "export progress": ["conveyor_exports_running", "conveyor_exports_processed_total"],
    "ingest progress": [
        "conveyor_tasks_ingesting",
        "conveyor_ingest_batches_running",
        "conveyor_ingest_batches_processed_total",
    ],
    "mailbox depths": ["conveyor_mailbox_messages", "conveyor_mailbox_capacity"],
    "restarts": ["conveyor_actor_restarts_total"],
    "disk": ["conveyor_disk_free_bytes", "conveyor_disk_size_bytes"],
    "build info": ["conveyor_build_info"],
}
# Every label takes its values from a fixed set of this program: routes, enumerations, calls of
# engines, actors.
BOUNDED = {
    "actor",
    "build",
    "call",
    "invariant",
    "kind",
    "method",
    "outcome",
    "quota",
    "reason",
    "result",
    "route",
    "state",
    "status",
    "status_class",
    "version",
}


@pytest.mark.parametrize("question", ANSWERS)
def test_the_metrics_answer(question: str) -> None:
    documented = set(re.findall(r"^\| `(\w+)` \|", metrics_table(), re.MULTILINE))

    assert [name for name in ANSWERS[question] if name not in documented] == []


def test_no_label_takes_its_values_from_callers_or_urls() -> None:
    rows = re.findall(r"^\| `\w+` \| \w+ \| ([^|]*) \|", metrics_table(), re.MULTILINE)

    labels = {label for row in rows for label in re.findall(r"`(\w+)`", row)}
    assert labels == BOUNDED


async def test_more_jobs_callers_and_hosts_make_no_more_samples(world: World) -> None:
    async def serve(name: str) -> set[str]:
        job = await world.submit(2, key=f"{name}-key", name=name)
        await world.get(f"/v1/jobs/{job['job_id']}", key=f"{name}-key")
        await world.get(f"/v1/jobs/{name}", key=f"{name}-key")
        await world.get(f"/unknown/{name}", key=f"{name}-key")
        text = (await world.get("/metrics")).body.decode()
        return {line.rpartition(" ")[0] for line in text.splitlines()}

    # Twice: the second scrape counts the first.
    await serve("first")
    before = await serve("second")
    after = await serve("third")

    assert after == before


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_to_complain_about() -> None:
    metrics = make_metrics(CollectorRegistry())
    metrics.actors.watch(lambda: [ActorFigures("exporter", 1), ActorFigures("pollers", 0, 1, 2)])
    metrics.registry.register(EngineUsage(SampleUsage(), {"hit": 1}))
    metrics.task_outcomes.labels("failed", "timeout").inc()

    text = generate_latest(metrics.registry)

    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
