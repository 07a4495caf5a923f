"""Task tokens on the wire: where one is taken, where it is refused, and that it is never shown."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from conveyor.api.server.app import make_app
from conveyor.api.server.auth import Passthrough
from conveyor.telemetry import make_metrics
from tests.api.world import SECRET, World, make_world
from tests.usecases.test_webhook_task_tokens import Machine

TOKEN = "AQCEAAAAKgAAAAMAAAAA+/="
TASKS = [{"url": "https://example.com/"}]


@pytest.fixture
def workflow_world() -> World:
    """A world with state machines in it."""
    world = make_world()
    world.env = replace(world.env, workflows=Machine())
    world.app = make_app(
        world.env,
        Passthrough(SECRET),
        notifier=world.receiver,
        metrics=make_metrics(CollectorRegistry()),
        ready=lambda: True,
    )
    return world


async def test_a_token_is_taken_and_shown_nowhere(workflow_world: World) -> None:
    seen = await workflow_world.post("/v1/jobs", {"tasks": TASKS, "sfn_task_token": TOKEN})
    await workflow_world.finish(seen.json)

    path = f"/v1/jobs/{seen.json['job_id']}"
    deliveries = await workflow_world.get(f"{path}/webhook/deliveries")
    responses = [seen, await workflow_world.get(path), deliveries]
    assert seen.status == 201
    assert [delivery["channel"] for delivery in deliveries.json["deliveries"]] == ["step_functions"]
    assert not any(TOKEN.encode() in response.body for response in responses)


async def test_without_state_machines_a_token_is_refused() -> None:
    seen = await make_world().post("/v1/jobs", {"tasks": TASKS, "sfn_task_token": TOKEN})

    assert (seen.status, seen.code) == (400, "step_functions_unavailable")
    assert seen.json["errors"][0]["pointer"] == "/sfn_task_token"
    assert TOKEN.encode() not in seen.body


@pytest.mark.parametrize("token", ["", "x" * 2049, "a b", "a\n", "é", 7])
async def test_a_token_that_is_none_is_refused_unquoted(
    workflow_world: World, token: object
) -> None:
    seen = await workflow_world.post("/v1/jobs", {"tasks": TASKS, "sfn_task_token": token})

    assert seen.status == 400
    assert seen.json["errors"][0]["pointer"] == "/sfn_task_token"
    assert "xxx" not in seen.body.decode()


async def test_a_schedule_takes_no_token(workflow_world: World) -> None:
    schedule = {"rate": {"every": 1, "unit": "day"}}
    body = {"type": "scheduled", "schedule": schedule, "tasks": TASKS, "sfn_task_token": TOKEN}

    seen = await workflow_world.post("/v1/jobs", body)

    assert seen.status == 400
    assert seen.json["errors"][0]["pointer"] == "/sfn_task_token"
