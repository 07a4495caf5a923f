"""Tests the deployed service from submit to deletion, and the decisions on its permissions."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import httpx
import pytest
from zenrows.batch import ZenRowsBatchClient

from conveyor.cli.demo import Site
from tests.contract.sdk_table import TABLE, Use, names_of
from tests.contract.server import ContractServer, a_receiver
from tests.deploy.containers.stage import IMAGE, Stage, until


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
    assert not any("SECRET" in item or "API_KEY" in item for item in facts["Config"]["Env"])
    assert facts["Size"] < 400_000_000
    assert (health["status"], health["build"]) == ("ok", health["build"])
    assert health["build"] != "unknown"


def test_wrong_keys_are_refused(stage: Stage, url: str) -> None:
    codes = [
        httpx.get(f"{url}/v1/jobs", headers={"X-API-Key": key}).status_code
        for key in (*stage.secret("ApiKeys").split(), "another-key-0123456789")
    ]

    assert codes == [200, 200, 401]


@pytest.fixture(scope="module")
def server(
    stage: Stage, url: str, site: Site, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ContractServer]:
    first, second = stage.secret("ApiKeys").split()
    with (
        pytest.MonkeyPatch.context() as patch,
        a_receiver() as receiver,
        ZenRowsBatchClient(first, base_url=f"{url}/v1") as client,
    ):
        # The SDK uploads to the address of the local AWS.
        patch.setenv("SSL_CERT_FILE", str(stage.certificate))
        folder = tmp_path_factory.mktemp("sdk")
        yield ContractServer(client, site.urls(100), receiver, folder, other_key=second)


@pytest.mark.parametrize("use", dict.fromkeys(TABLE.values()), ids=lambda use: names_of(use)[0])
def test_every_method_of_the_published_sdk_works(server: ContractServer, use: Use) -> None:
    use(server)


def test_a_long_list_is_ingested_stopped_and_deleted(stage: Stage, url: str, site: Site) -> None:
    headers = {"X-API-Key": stage.key}
    with httpx.Client(base_url=url, headers=headers, timeout=120) as client:
        tasks = [{"url": page_url} for page_url in site.urls(12_000)]
        answer = client.post("/v1/jobs", json={"tasks": tasks, "max_inflight": 5})
        job_id = answer.json()["job_id"]
        run = until(
            "the long list to be ingested",
            lambda: (
                (latest_run := client.get(f"/v1/jobs/{job_id}").json()["latest_run"])["stats"][
                    "total"
                ]
                == 12_000
                and latest_run
            ),
        )
        audit = client.get(f"/v1/jobs/{job_id}/runs/{run['run_id']}/audit")
        stopped = client.post(f"/v1/jobs/{job_id}/stop")
        deleted = client.delete(f"/v1/jobs/{job_id}")

    assert answer.status_code == 202
    assert audit.status_code == 200
    assert (stopped.status_code, deleted.status_code) == (200, 202)


def test_a_page_is_extracted(stage: Stage, url: str, site: Site) -> None:
    job = {
        "tasks": [{"url": site.urls(1)[0]}],
        "zenrows_params": {"css_extractor": json.dumps({"title": "h1"})},
    }
    with httpx.Client(base_url=url, headers={"X-API-Key": stage.key}, timeout=60) as client:
        job_id = client.post("/v1/jobs", json=job).raise_for_status().json()["job_id"]
        until(
            "the page to be extracted",
            lambda: client.get(f"/v1/jobs/{job_id}").json()["latest_run"]["terminal"],
        )
        (result,) = client.get(f"/v1/jobs/{job_id}/results").json()["results"]
        content = client.get(f"/v1/jobs/{job_id}/tasks/{result['task_id']}/content")

    assert content.json() == {"title": "Page 0"}


def test_ps_lists_the_workers(stage: Stage, url: str) -> None:
    ended = stage.run("api", "ps", "--json")

    assert ended.returncode == 0, ended.stderr
    workers = json.loads(ended.stdout)["workers"]
    assert len(workers) == 2
    assert {worker["capacity"] for worker in workers} == {300}


@pytest.mark.parametrize("role", ["api", "worker"])
def test_check_reports_no_problem_of_the_deployment(stage: Stage, role: str) -> None:
    ended = stage.run(role, "check", "--json")

    findings = json.loads(ended.stdout)
    assert [finding for finding in findings if "problem" in finding] == []
    assert ended.returncode == 0


def test_no_call_of_the_program_was_denied(stage: Stage, url: str) -> None:
    assert stage.denials() == []
    for role in ("api", "worker"):
        print(f"{role}: {sum(stage.used(role).values())} calls allowed, 0 denied")
