"""Tests state machines that wait for a job, and that a worker notifies of its end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.aws import an_access, an_aws_client, an_http_transport
from tests.e2e.cloud import Cloud, a_client, aws_deployment, ended_run, run_of
from tests.e2e.pages import some_pages
from tests.e2e.programs import until
from tests.e2e.test_stop import a_silent_site
from tests.engines.aws.test_step_functions import Machine

pytestmark = pytest.mark.slow


@pytest.fixture
def cloud(request: pytest.FixtureRequest, redis: str, tmp_path: Path) -> Iterator[Cloud]:
    with aws_deployment(request, tmp_path, redis=redis) as cloud:
        yield cloud


class Waiting:
    """A waiting execution of a state machine on the server that the deployment calls."""

    def __init__(self, cloud: Cloud) -> None:
        server = cloud.environ["AWS_ENDPOINT_URL_SFN"]
        self.access = an_access(stepfunctions=server, sqs=server)
        self.execution = ""

    def start(self) -> str:
        async def start() -> str:
            async with an_http_transport(self.access) as transport:
                machine = Machine(an_aws_client(transport))
                token = await machine.start()
                self.execution = machine.execution
                return token

        return trio.run(start)

    def end(self) -> dict[str, str]:
        async def end() -> dict[str, str]:
            async with an_http_transport(self.access) as transport:
                machine = Machine(an_aws_client(transport))
                machine.execution = self.execution
                return await machine.end()

        return trio.run(end)


def test_a_state_machine_continues_when_its_job_has_ended(cloud: Cloud) -> None:
    waiting = Waiting(cloud)
    token = waiting.start()
    with some_pages() as pages, a_client(cloud.api()) as client:
        cloud.workers(1)
        body = {"tasks": pages.tasks(20), "sfn_task_token": token}
        submitted = client.post("/v1/jobs", json=body).json()
        until("the run to end", lambda: ended_run(client, submitted["job_id"]))
        end = waiting.end()

    output = json.loads(end["output"])
    assert end["status"] == "SUCCEEDED"
    assert output["job_id"] == submitted["job_id"]
    assert (output["status"], output["stats"]["successful"]) == ("completed", 20)
    assert not any(token in log.read_text() for log in cloud.logs.values())


def test_a_state_machine_fails_when_its_job_is_stopped(cloud: Cloud) -> None:
    waiting = Waiting(cloud)
    token = waiting.start()
    with a_silent_site() as port, a_client(cloud.api()) as client:
        cloud.workers(1)
        body = {"tasks": [{"url": f"http://127.0.0.1:{port}/"}], "sfn_task_token": token}
        job_id = client.post("/v1/jobs", json=body).json()["job_id"]
        until("work in hand", lambda: run_of(client, job_id)["stats"]["inflight"] or None)
        client.post(f"/v1/jobs/{job_id}/stop")
        end = waiting.end()

    assert (end["status"], end["error"]) == ("FAILED", "Conveyor.run.stopped")
    assert json.loads(end["cause"])["job_id"] == job_id


def test_the_delivery_of_an_unknown_token_is_given_up(cloud: Cloud) -> None:
    with some_pages() as pages, a_client(cloud.api()) as client:
        cloud.workers(1)
        body = {"tasks": pages.tasks(1), "sfn_task_token": "of-no-task"}
        job_id = client.post("/v1/jobs", json=body).json()["job_id"]

        def failure_of_task() -> dict[str, str] | None:
            page = client.get(f"/v1/jobs/{job_id}/webhook/deliveries").json()["deliveries"]
            executions: list[dict[str, str]] = [
                delivery for delivery in page if delivery["status"] == "exhausted"
            ]
            return executions[0] if executions else None

        delivery = until("the delivery to be given up", failure_of_task)

    assert delivery["channel"] == "step_functions"
    assert delivery["last_error"] == "step_functions:TaskDoesNotExist"
