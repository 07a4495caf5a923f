"""Runs: list, show, stop with a receipt, pause, resume, delete."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import pytest
import trio

from conveyor.api.schedule import load_job_response
from conveyor.domain.changes import Key, R, RunKey
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.model import RunFailure
from conveyor.domain.queries import Q, Query, StatsOf
from conveyor.domain.run import termination
from conveyor.ports.store import Store
from conveyor.usecases.run import runs
from tests.api.world import World
from tests.builders import CALLER
from tests.usecases.world import a_world, submit, work


async def test_a_run_counts_what_is_done_in_flight_and_waiting(world: World) -> None:
    job = await world.submit(4)
    job_id, run_id = job["job_id"], job["latest_run"]["run_id"]
    good, bad, *_ = await world.tasks_of(job_id, run_id)
    await world.succeed(job_id, good)
    await world.fail(job_id, bad)
    await world.env.coordinator.acquire(JobId(job_id), RunId(run_id), count_max=1, cap=10, ttl_s=30)

    stats = (await world.get(f"/v1/jobs/{job_id}/runs/{run_id}")).json["stats"]

    assert stats == {
        "total": 4,
        "completed": 2,
        "successful": 1,
        "failed": 1,
        "inflight": 1,
        "retrying": 0,
        "pending": 1,
        "spend": {"credits": 1, "cost": 0.0025},
        "stored_bytes": 3,
        "failure_reasons": {"bad_target": 1},
    }


async def test_more_leases_than_tasks_are_left_still_add_up(world: World) -> None:
    job = await world.submit(2)
    job_id, run_id = job["job_id"], job["latest_run"]["run_id"]
    await world.env.coordinator.acquire(JobId(job_id), RunId(run_id), count_max=9, cap=10, ttl_s=30)

    stats = (await world.get(f"/v1/jobs/{job_id}/runs/{run_id}")).json["stats"]

    assert (stats["inflight"], stats["pending"], stats["completed"]) == (2, 0, 0)


async def test_a_run_completes_with_its_last_task(world: World) -> None:
    job = await world.submit(2)
    await world.finish(job)

    run = (await world.get(f"/v1/jobs/{job['job_id']}")).json["latest_run"]

    assert (run["status"], run["terminal"]) == ("completed", True)
    assert (run["stats"]["inflight"], run["stats"]["pending"]) == (0, 0)


@pytest.mark.parametrize("verb", ["stop", "cancel"])
async def test_a_stop_answers_with_a_receipt_and_can_be_repeated(world: World, verb: str) -> None:
    job = await world.submit(3)
    path = f"/v1/jobs/{job['job_id']}"

    first = await world.post(f"{path}/{verb}")
    again = await world.post(f"{path}/{verb}")

    assert first.status == again.status == 200
    assert first.json["status"] == "stopped"
    assert first.json["terminal"] is True
    counts = {"inflight": 0, "leases": 0, "released": 0, "abandoned": 0}
    assert first.json["receipt"] == {"complete": True, **counts}
    assert first.json["stats"]["pending"] == 3


async def test_a_stop_tells_of_leases_that_are_still_held(world: World) -> None:
    job = await world.submit(3)
    job_id, run_id = job["job_id"], job["latest_run"]["run_id"]
    await world.env.coordinator.acquire(JobId(job_id), RunId(run_id), count_max=2, cap=10, ttl_s=30)

    seen = await world.post(f"/v1/jobs/{job_id}/stop")

    receipt = seen.json["receipt"]
    assert (receipt["complete"], receipt["inflight"], receipt["leases"]) == (False, 2, 2)
    assert seen.json["stats"]["inflight"] == 0


async def test_an_ended_run_cannot_be_stopped_or_paused(world: World) -> None:
    job = await world.submit(1)
    await world.finish(job)
    path = f"/v1/jobs/{job['job_id']}"

    seen = [await world.post(f"{path}/{verb}") for verb in ("stop", "pause", "resume")]

    assert [(response.status, response.code) for response in seen] == [
        (409, "run_not_stoppable"),
        (409, "run_not_pausable"),
        (409, "run_not_pausable"),
    ]


async def test_a_pause_shows_until_it_is_lifted(world: World) -> None:
    job = await world.submit(1)
    path = f"/v1/jobs/{job['job_id']}"

    paused = await world.post(f"{path}/pause")
    again = await world.post(f"{path}/pause")
    resumed = await world.post(f"{path}/resume")

    assert paused.json["pause_state"] == again.json["pause_state"] == "paused"
    assert paused.json["status"] == "running"
    assert "pause_state" not in resumed.json


async def test_a_failed_run_says_why(world: World) -> None:
    job = await world.submit(1)
    run = await world.run(job["job_id"], job["latest_run"]["run_id"])
    await runs.fail(world.env, run, RunFailure.API_KEY_CAP_REACHED, "The day's cap was reached.")
    await runs.finish_stop(world.env, run.job_id, run.run_id)

    seen = (await world.get(f"/v1/jobs/{job['job_id']}/runs/{run.run_id}")).json

    assert seen["status"] == "failed"
    assert seen["failure_reason"] == "api_key_cap_reached"
    assert seen["failure_detail"] == "The day's cap was reached."


async def test_a_run_that_was_stopped_for_a_reason_shows_it(world: World) -> None:
    job = await world.submit(1)
    run = await world.run(job["job_id"], job["latest_run"]["run_id"])
    change = termination.request_stop(run, reason=termination.INGEST_FAILED, now=world.env.now())
    await world.env.commit(change)
    await runs.finish_stop(world.env, run.job_id, run.run_id)

    seen = (await world.get(f"/v1/jobs/{job['job_id']}/runs/{run.run_id}")).json

    assert (seen["status"], seen["stop_reason"]) == ("stopped", "ingest_failed")


async def test_runs_are_listed_newest_first_page_by_page(world: World) -> None:
    job = await world.submit(1)
    job_id = job["job_id"]
    run_ids = [job["latest_run"]["run_id"]]
    for _ in range(3):
        await world.post(f"/v1/jobs/{job_id}/stop")
        run_ids.append((await world.post(f"/v1/jobs/{job_id}/rerun")).json["latest_run"]["run_id"])

    first = (await world.get(f"/v1/jobs/{job_id}/runs?limit=3")).json
    second = (await world.get(f"/v1/jobs/{job_id}/runs?cursor={first['next_cursor']}")).json

    assert [run["run_id"] for run in first["runs"] + second["runs"]] == run_ids[::-1]
    assert second["next_cursor"] is None


async def test_a_deleted_run_is_gone_and_deleting_it_again_is_fine(world: World) -> None:
    job = await world.submit(1)
    path = f"/v1/jobs/{job['job_id']}/runs/{job['latest_run']['run_id']}"

    first = await world.call("DELETE", path)
    again = await world.call("DELETE", path)

    assert (first.status, first.body) == (202, b"")
    assert (again.status, again.body) == (202, b"")
    assert (await world.get(path)).status == 404
    assert "latest_run" not in (await world.get(f"/v1/jobs/{job['job_id']}")).json


async def test_a_run_whose_results_others_inherit_cannot_be_deleted(world: World) -> None:
    job = await world.submit(2)
    job_id, first = job["job_id"], job["latest_run"]["run_id"]
    good, bad = await world.tasks_of(job_id, first)
    await world.succeed(job_id, good)
    await world.fail(job_id, bad)
    await world.post(f"/v1/jobs/{job_id}/rerun?status=failed")

    seen = await world.call("DELETE", f"/v1/jobs/{job_id}/runs/{first}")

    assert (seen.status, seen.code) == (409, "run_has_descendants")


@dataclass(slots=True)
class OvertakenStore:
    """A store in which a run changes after its counters were read, and before its row is."""

    inner: Store
    change: Callable[[], Awaitable[object]]
    changed: trio.Event = field(default_factory=trio.Event)

    async def find(self, query: Query[Q]) -> list[Q]:
        rows = await self.inner.find(query)
        if isinstance(query, StatsOf) and not self.changed.is_set():
            await self.change()
            self.changed.set()
        return rows

    async def read(self, key: Key[R]) -> R | None:
        if isinstance(key, RunKey):
            await self.changed.wait()
        return await self.inner.read(key)


async def test_counters_are_never_older_than_the_run_beside_them() -> None:
    env = a_world().env
    job, run = (accepted := await submit(env, 2)).job, accepted.run
    await load_job_response(env, CALLER, job.job_id)
    store = OvertakenStore(env.store, partial(work, env, run))

    shown = await load_job_response(replace(env, store=cast("Store", store)), CALLER, job.job_id)

    assert shown.latest_run is not None
    assert (shown.latest_run.status, shown.latest_run.stats.completed) == ("completed", 2)
