"""Scheduled jobs over HTTP: what is taken, what is shown, and what is refused where."""

from __future__ import annotations

from typing import Any

import pytest

from conveyor.domain.ids import JobId, RunId
from conveyor.domain.model import Run
from conveyor.usecases import schedule as schedules
from conveyor.usecases.run import ingest
from conveyor.usecases.schedule import Fired
from tests.api.world import World, make_world

HOURLY = {"rate": {"every": 1, "unit": "hour"}}
NINE = {
    "calendar": {"times_of_day": ["09:00", "18:30"], "cadence": {"weekly": {"days": ["mon"]}}},
    "timezone": "Europe/Berlin",
}


async def submit(world: World, schedule: Any = HOURLY, count: int = 2, **fields: Any) -> str:
    body = await world.submit(count, type="scheduled", schedule=schedule, **fields)
    return str(body["job_id"])


async def shown(world: World, job_id: str) -> Any:
    return (await world.get(f"/v1/jobs/{job_id}")).json


async def fire(world: World, job_id: str) -> Run:
    """Fires what is due and brings its list in, as the actors would."""
    assert await schedules.trigger_schedule(world.env, JobId(job_id)) is Fired.STARTED
    run_id = (await shown(world, job_id))["latest_run"]["run_id"]
    return await ingest_list(world, job_id, run_id)


async def ingest_list(world: World, job_id: str, run_id: str) -> Run:
    for batch in await ingest.open_batches_of(world.env, JobId(job_id), RunId(run_id)):
        taken = await ingest.acquire_batch(world.env, batch)
        assert taken is not None
        await ingest.ingest_batch(world.env, taken)
    return await world.run(job_id, run_id)


async def test_a_scheduled_job_is_accepted_without_a_run(world: World) -> None:
    lines = [{"url": "https://example.com/"}] * 3

    seen = await world.post(
        "/v1/jobs", {"type": "scheduled", "schedule": HOURLY, "tasks": lines, "name": "Hourly"}
    )

    assert seen.status == 201
    assert seen.json == {
        "job_id": seen.json["job_id"],
        "status": "closed",
        "accepted_tasks": 3,
    }
    job = await shown(world, seen.json["job_id"])
    assert (job["type"], job["name"]) == ("scheduled", "Hourly")
    assert job["schedule"] == HOURLY
    assert job["schedule_state"] == "active"
    assert job["next_scheduled_run"] == "2023-11-14T23:13:20.000Z"
    assert job["next_scheduled_runs"][:2] == [
        "2023-11-14T23:13:20.000Z",
        "2023-11-15T00:13:20.000Z",
    ]
    assert len(job["next_scheduled_runs"]) == 5
    assert "latest_run" not in job
    assert "skipped_fires" not in job


@pytest.mark.parametrize(
    ("schedule", "next_run"),
    [
        ({"at": "2023-11-15T09:00:00", "timezone": "Europe/Berlin"}, "2023-11-15T08:00:00.000Z"),
        ({"at": "2023-11-15T09:01", "timezone": "UTC"}, "2023-11-15T09:01:00.000Z"),
        ({"rate": {"every": 15, "unit": "minute"}}, "2023-11-14T22:28:20.000Z"),
        (NINE, "2023-11-20T08:00:00.000Z"),
        (
            {
                "calendar": {"times_of_day": ["09:00"], "cadence": {"daily": {}}},
                "timezone": "Asia/Kolkata",
            },
            "2023-11-15T03:30:00.000Z",
        ),
        (
            {
                "calendar": {"times_of_day": ["09:00"], "cadence": {"monthly": {"days": [31, 1]}}},
                "timezone": "UTC",
            },
            "2023-12-01T09:00:00.000Z",
        ),
        (
            {"cron": "*/7 9 * * mon-fri", "timezone": "UTC", "overlap": "queue"},
            "2023-11-15T09:00:00.000Z",
        ),
    ],
)
async def test_every_kind_of_schedule_is_shown_as_it_was_given(
    world: World, schedule: Any, next_run: str
) -> None:
    job = await shown(world, await submit(world, schedule))

    assert job["schedule"] == schedule
    assert job["next_scheduled_run"] == next_run


async def test_a_fired_run_says_what_set_it_in_motion(world: World) -> None:
    job_id = await submit(world)
    world.clock.advance(3600)

    run = await fire(world, job_id)

    job = await shown(world, job_id)
    assert job["latest_run"]["trigger"] == "scheduled"
    assert job["latest_run"]["scheduled_for"] == "2023-11-14T23:13:20.000Z"
    assert job["latest_run"]["stats"]["total"] == run.total == 2
    assert job["next_scheduled_run"] == "2023-11-15T00:13:20.000Z"


async def test_skipped_times_are_shown_with_their_reason(world: World) -> None:
    job_id = await submit(world)
    world.clock.advance(3 * 3600)

    await fire(world, job_id)

    assert (await shown(world, job_id))["skipped_fires"] == [
        {
            "first_at": "2023-11-15T00:13:20.000Z",
            "until": "2023-11-15T01:13:20.000Z",
            "reason": "missed",
        }
    ]


async def test_a_scheduled_job_is_fired_by_hand(world: World) -> None:
    job_id = await submit(world)

    seen = await world.post(f"/v1/jobs/{job_id}/rerun")

    assert seen.status == 202
    assert "rerun_of" not in seen.json
    assert (seen.json["retried_tasks"], seen.json["inherited_tasks"]) == (2, 0)
    assert seen.json["latest_run"]["trigger"] == "manual"
    run_id = seen.json["latest_run"]["run_id"]
    assert (await ingest_list(world, job_id, run_id)).total == 2


async def test_a_schedule_is_replaced_as_a_whole(world: World) -> None:
    job_id = await submit(world, {**HOURLY, "overlap": "queue"})
    world.clock.advance(60)

    seen = await world.call("PUT", f"/v1/jobs/{job_id}/schedule", NINE)
    again = await world.call("PUT", f"/v1/jobs/{job_id}/schedule", NINE)

    assert seen.status == again.status == 200
    assert seen.json["schedule"] == NINE
    assert seen.json["next_scheduled_run"] == "2023-11-20T08:00:00.000Z"
    assert seen.json["updated_at"] == "2023-11-14T22:14:20.000Z"
    assert again.body == seen.body


async def test_a_paused_schedule_shows_what_would_come_next(world: World) -> None:
    job_id = await submit(world)
    path = f"/v1/jobs/{job_id}/schedule/state"

    paused = (await world.post(path, {"schedule_state": "paused"})).json
    world.clock.advance(2.5 * 3600)
    later = await shown(world, job_id)
    resumed = (await world.post(path, {"schedule_state": "active"})).json

    assert (paused["schedule_state"], resumed["schedule_state"]) == ("paused", "active")
    assert paused["next_scheduled_run"] == "2023-11-14T23:13:20.000Z"
    assert later["next_scheduled_run"] == resumed["next_scheduled_run"]
    assert resumed["next_scheduled_run"] == "2023-11-15T01:13:20.000Z"
    assert [skip["reason"] for skip in resumed["skipped_fires"]] == ["paused"]


@pytest.mark.parametrize(
    ("schedule", "pointer"),
    [
        ({}, ""),
        ({**HOURLY, "cron": "* * * * *", "timezone": "UTC"}, ""),
        ({"rate": {"every": 0, "unit": "hour"}}, "/rate/every"),
        ({"rate": {"every": 10**9, "unit": "hour"}}, "/rate/every"),
        ({"rate": {"every": 1, "unit": "second"}}, "/rate/unit"),
        ({"rate": {"every": 1}}, "/rate/unit"),
        ({"at": "2030-01-01T09:00:00Z", "timezone": "UTC"}, "/at"),
        ({"at": "2030-01-01T09:00:00+01:00", "timezone": "UTC"}, "/at"),
        ({"at": "2030-01-01T09:00\n", "timezone": "UTC"}, "/at"),
        ({"at": "2030-02-30T09:00", "timezone": "UTC"}, "/at"),
        ({"at": "2030-01-01", "timezone": "UTC"}, "/at"),
        ({"at": "2030-01-01T09:00"}, "/timezone"),
        ({"at": "2030-01-01T09:00", "timezone": "Europe/Bonn"}, "/timezone"),
        ({"cron": "* * * *", "timezone": "UTC"}, "/cron"),
        ({"cron": "* * * * *"}, "/timezone"),
        ({**NINE, "timezone": "../UTC"}, "/timezone"),
        ({"calendar": {"times_of_day": [], "cadence": {"daily": {}}}}, "/calendar/times_of_day"),
        (
            {"calendar": {"times_of_day": ["9:00"], "cadence": {"daily": {}}}},
            "/calendar/times_of_day/0",
        ),
        (
            {"calendar": {"times_of_day": ["09:00"], "cadence": {}}, "timezone": "UTC"},
            "/calendar/cadence",
        ),
        (
            {"calendar": {"times_of_day": ["09:00"], "cadence": {"weekly": {"days": ["Mon"]}}}},
            "/calendar/cadence/weekly/days/0",
        ),
        (
            {"calendar": {"times_of_day": ["09:00"], "cadence": {"monthly": {"days": [32]}}}},
            "/calendar/cadence/monthly/days/0",
        ),
        ({**HOURLY, "overlap": "both"}, "/overlap"),
        ({**HOURLY, "surprise": 1}, "/surprise"),
    ],
)
async def test_a_schedule_that_is_wrong_is_pointed_at(
    world: World, schedule: Any, pointer: str
) -> None:
    job_id = await submit(world)
    lines = [{"url": "https://example.com/"}]

    submitted = await world.post(
        "/v1/jobs", {"type": "scheduled", "schedule": schedule, "tasks": lines}
    )
    replaced = await world.call("PUT", f"/v1/jobs/{job_id}/schedule", schedule)

    assert (submitted.status, replaced.status) == (400, 400)
    assert submitted.code == replaced.code == "invalid_argument"
    assert submitted.json["errors"][0]["pointer"] == "/schedule" + pointer
    assert replaced.json["errors"][0]["pointer"] == pointer
    assert (await shown(world, job_id))["schedule"] == HOURLY


@pytest.mark.parametrize(
    "fields",
    [
        {"schedule": {"at": "2020-01-01T00:00", "timezone": "UTC"}},
        {"schedule": {"cron": "0 0 30 2 *", "timezone": "UTC"}},
        {"schedule": HOURLY, "status": "open"},
        {"schedule": HOURLY, "tasks": []},
        {"schedule": HOURLY, "tasks": [{"url": "ftp://example.com/"}]},
    ],
)
async def test_a_scheduled_job_that_could_not_work_is_refused(world: World, fields: Any) -> None:
    body = {"type": "scheduled", "tasks": [{"url": "https://example.com/"}], **fields}

    seen = await world.post("/v1/jobs", body)

    assert (seen.status, seen.code) == (400, "invalid_argument")
    assert (await world.get("/v1/jobs")).json["jobs"] == []


async def test_a_regular_job_ignores_a_schedule_and_has_none(world: World) -> None:
    job_id = (await world.submit(1, schedule=HOURLY))["job_id"]

    job = await shown(world, job_id)
    replaced = await world.call("PUT", f"/v1/jobs/{job_id}/schedule", HOURLY)
    paused = await world.post(f"/v1/jobs/{job_id}/schedule/state", {"schedule_state": "paused"})

    assert job["type"] == "regular"
    assert not {"schedule", "schedule_state", "next_scheduled_run"} & job.keys()
    assert (replaced.status, replaced.code) == (paused.status, paused.code) == (409, "conflict")


async def test_what_needs_an_open_job_or_a_run_is_a_conflict(world: World) -> None:
    job_id = await submit(world)
    path = f"/v1/jobs/{job_id}"
    calls = [
        ("/tasks", {"tasks": [{"url": "https://example.com/"}]}, "job_not_open"),
        ("/close", None, "job_not_open"),
        ("/stop", None, "run_not_stoppable"),
        ("/pause", None, "run_not_pausable"),
        ("/resume", None, "run_not_pausable"),
        ("/rerun?status=failed", None, "no_prior_run"),
    ]

    for rest, body, code in calls:
        seen = await world.post(path + rest, body)
        assert (seen.status, seen.code) == (409, code), rest

    assert (await world.get(path + "/results")).status == 404
    assert (await world.get(path + "/runs")).json["runs"] == []


async def test_jobs_are_listed_by_type(world: World) -> None:
    regular = (await world.submit(1))["job_id"]
    scheduled = await submit(world)

    listed = {
        kind: [job["job_id"] for job in (await world.get(f"/v1/jobs?type={kind}")).json["jobs"]]
        for kind in ("regular", "scheduled")
    }

    assert listed == {"regular": [regular], "scheduled": [scheduled]}


async def test_a_repeated_submit_makes_one_job_and_is_answered_alike(world: World) -> None:
    body = {"type": "scheduled", "schedule": HOURLY, "tasks": [{"url": "https://example.com/"}]}

    first = await world.post("/v1/jobs", body, headers={"Idempotency-Key": "k"})
    world.clock.advance(60)
    second = await world.post("/v1/jobs", body, headers={"Idempotency-Key": "k"})

    assert first.body == second.body
    assert len((await world.get("/v1/jobs")).json["jobs"]) == 1


async def test_a_long_list_is_kept_for_every_fire() -> None:
    world = make_world(sync_tasks_max=5)
    job_id = await submit(world, count=7)
    world.clock.advance(3600)

    assert (await fire(world, job_id)).total == 7


async def test_a_deleted_scheduled_job_is_gone_and_fires_no_more(world: World) -> None:
    job_id = await submit(world)

    deleted = await world.call("DELETE", f"/v1/jobs/{job_id}")
    world.clock.advance(3600)

    assert deleted.status == 202
    assert await schedules.trigger_schedule(world.env, JobId(job_id)) is Fired.NOT_DUE
    assert (await world.call("PUT", f"/v1/jobs/{job_id}/schedule", HOURLY)).status == 404
