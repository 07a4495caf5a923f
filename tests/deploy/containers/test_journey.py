"""A whole journey through the deployed service, and what its roles were allowed and refused."""

from __future__ import annotations

import copy
import json
import subprocess
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from zenrows.batch import At, Rate, ZenRowsBatchClient

from conveyor.cli.demo import Site
from tests.deploy.containers.stage import IMAGE, Stage, until
from tests.deploy.templates import actions_of

# Granted, and not used by this journey.
KEPT = {
    "ApiRole": {
        "s3:ListBucket": "a missing object is 404 instead of 403",
        "s3:DeleteObject": "removes a staged list whose submit was refused",
        "dynamodb:BatchWriteItem": "removes claims of keys in bulk when a submit is refused late",
        "dynamodb:DeleteItem": "drops an idempotency claim whose request could not start",
        "s3:AbortMultipartUpload": "ends a streamed list that breaks off",
        "sqs:DeleteQueue": "removes the queue of a run that was deleted while it was created",
        "sqs:SendMessage": "the local AWS checks the batch action instead",
        "dynamodb:ConditionCheckItem": "guards submits that add to an existing job",
    },
    "WorkerRole": {
        "s3:AbortMultipartUpload": "ends an export that breaks off",
        "states:SendTaskSuccess": "jobs with a task token; there is none here",
        "states:SendTaskFailure": "jobs with a task token; there is none here",
        "sqs:SendMessage": "the local AWS checks the batch action instead",
        "sqs:DeleteMessage": "the local AWS checks the batch action instead",
        "sqs:ChangeMessageVisibility": "the local AWS checks the batch action instead",
        "dynamodb:ConditionCheckItem": "guards repairs of the sweeper",
        "dynamodb:DeleteItem": "removes rows one at a time where a condition is needed",
    },
}


def test_the_image_is_small_private_and_healthy(stage: Stage, url: str) -> None:
    (facts,) = json.loads(
        subprocess.run(
            ["podman", "image", "inspect", IMAGE], capture_output=True, check=True
        ).stdout
    )
    api, worker = stage.containers[0], stage.containers[1]
    health = httpx.get(f"{url}/healthz").json()

    for container in (api, worker):
        subprocess.run(["podman", "healthcheck", "run", container.name], check=True)
    assert facts["User"] == "10001:10001"
    assert not any("SECRET" in each or "API_KEY" in each for each in facts["Config"]["Env"])
    assert facts["Size"] < 400_000_000
    assert (health["status"], health["build"]) == ("ok", health["build"])
    assert health["build"] != "unknown"


def test_wrong_keys_are_refused(stage: Stage, url: str) -> None:
    codes = [
        httpx.get(f"{url}/v1/jobs", headers={"X-API-Key": key}).status_code
        for key in (stage.secret("ApiKeys"), "another-key-0123456789")
    ]

    assert codes == [200, 401]


def test_the_whole_method_table_of_the_published_sdk(
    stage: Stage, url: str, site: Site, tmp_path: Path
) -> None:
    urls = site.urls(40)
    opened_client: Any = ZenRowsBatchClient(stage.secret("ApiKeys"), base_url=f"{url}/v1")
    with opened_client as client:
        job = client.submit_regular(urls)
        until("the run to end", lambda: job.run.load().status.value == "completed")
        rows = list(job.run.results(status="successful"))
        assert len(rows) + len(list(job.run.results(status="failed"))) == 40
        assert job.run.download_task_to_memory(rows[0])
        assert job.run.task_history(rows[0].task_id).events
        assert job.job_id in [each.job_id for each in client.list_jobs().jobs]
        job.run.download_to_dir(tmp_path / "pages")
        assert len(list((tmp_path / "pages").iterdir())) >= len(rows)
        archive = tmp_path / "all.zip"
        run_id = job.run.load().run_id
        client.download_all_results(job.job_id, run_id, archive, poll_interval=0.5)
        assert len(zipfile.ZipFile(archive).namelist()) >= len(rows)

        opened = client.submit_open(idempotency_key="once")
        opened.add_tasks({"tasks": [{"url": each} for each in urls[:5]]})
        assert opened.run.pause().data.pause_state.value == "paused"
        opened.run.resume()
        opened.close()
        until("the open job to end", lambda: opened.run.load().status.value == "completed")
        opened.rerun()
        opened.run.stop()
        opened.delete()

        soon = (datetime.now(UTC) + timedelta(days=2)).replace(tzinfo=None, microsecond=0)
        once = client.submit_scheduled(At(soon, timezone="Europe/Berlin"), urls[:2])
        often = client.submit_scheduled(Rate(every=15, unit="minute"), urls[:2], name="Often")
        often.schedule.pause()
        often.schedule.resume()
        fired = often.rerun()
        until("the fired run to end", lambda: often.run.load().status.value == "completed")
        assert fired.data.trigger.value == "manual"
        for each in (once, often):
            each.delete()


def test_long_lists_uploads_and_deletes(stage: Stage, url: str, site: Site) -> None:
    headers = {"X-API-Key": stage.secret("ApiKeys")}
    with httpx.Client(base_url=url, headers=headers, timeout=120) as client:
        tasks = [{"url": each} for each in site.urls(12_000)]
        answer = client.post("/v1/jobs", json={"tasks": tasks, "max_inflight": 5})
        job_id = answer.json()["job_id"]
        run = until(
            "the long list to be ingested",
            lambda: (
                (found := client.get(f"/v1/jobs/{job_id}").json()["latest_run"])["stats"]["total"]
                == 12_000
                and found
            ),
        )
        audit = client.get(f"/v1/jobs/{job_id}/runs/{run['run_id']}/audit")
        stopped = client.post(f"/v1/jobs/{job_id}/stop")
        deleted = client.delete(f"/v1/jobs/{job_id}")

    assert answer.status_code == 202
    assert audit.status_code == 200
    assert (stopped.status_code, deleted.status_code) == (200, 202)


def test_ps_lists_the_workers(stage: Stage, url: str) -> None:
    ended = stage.run("api", "ps", "--json")

    assert ended.returncode == 0, ended.stderr
    workers = json.loads(ended.stdout)["workers"]
    assert len(workers) == 2
    assert {worker["capacity"] for worker in workers} == {300}


@pytest.mark.parametrize("role", ["api", "worker"])
def test_a_deployment_lacks_nothing(stage: Stage, role: str) -> None:
    ended = stage.run(role, "check", "--json")

    findings = json.loads(ended.stdout)
    assert [finding for finding in findings if "problem" in finding] == []
    assert ended.returncode == 0


@pytest.mark.parametrize("role", ["ApiRole", "WorkerRole"])
def test_nothing_was_denied_and_every_granted_action_is_used_or_kept(
    stage: Stage, url: str, role: str
) -> None:
    used = set(stage.used(role.removesuffix("Role").lower()))
    unused = actions_of(role) - used - KEPT[role].keys()

    assert stage.denials() == []
    assert unused == set()


@pytest.mark.parametrize(
    ("role", "action"),
    [
        (role, action)
        for role in ("api", "worker")
        for action in sorted(actions_of(f"{role.title()}Role"))
    ],
)
def test_without_an_action_the_check_names_it(stage: Stage, role: str, action: str) -> None:
    document = stage.document(role)
    without = copy.deepcopy(document)
    for statement in without["Statement"]:
        actions = statement["Action"]
        kept = [
            each for each in ([actions] if isinstance(actions, str) else actions) if each != action
        ]
        statement["Action"] = kept or ["none:None"]
    batches = f"{action}Batch" if action.startswith("sqs:") else ""
    try:
        stage.put_document(role, role, without)
        stage.put_policy(role, "local-dialect", _dialect(role, batches))

        ended = stage.run(role, "check")
    finally:
        stage.put_document(role, role, document)
        stage.allow_batches()

    assert ended.returncode == 1, ended.stdout
    assert f"missing permission: {action}" in ended.stdout


def _dialect(role: str, without: str) -> list[str]:
    batches = ["sqs:SendMessageBatch"]
    if role == "worker":
        batches += ["sqs:DeleteMessageBatch", "sqs:ChangeMessageVisibilityBatch"]
    return [each for each in batches if each != without] or ["none:None"]
