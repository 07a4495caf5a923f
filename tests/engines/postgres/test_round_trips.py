"""How many round trips a request takes, from its use case to the server."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from conveyor.api.schedule import load_job_response
from conveyor.domain.ids import JobId
from conveyor.engines.postgres.database import DatabaseConfig
from conveyor.engines.postgres.engine import open_postgres
from conveyor.usecases.lookup import load_owned_job_and_run
from conveyor.usecases.run import runs
from conveyor.usecases.submit import jobs
from tests.builders import CALLER
from tests.postgres import record_trips
from tests.usecases.world import a_world, some_drafts


async def test_a_job_that_was_shown_before_is_shown_in_one_round_trip(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_postgres(DatabaseConfig(url=url), random=Random(1)) as engine:
        env = replace(
            a_world().env, store=engine.store, queue=engine.queue, coordinator=engine.coordinator
        )
        asked = jobs.Submission(drafts=some_drafts(3))
        accepted = await jobs.submit(env, CALLER, asked, job_id=JobId(env.new_id()))
        job_id = accepted.job.job_id
        trips = record_trips(monkeypatch)
        taken = []

        async def look() -> int | None:
            trips.clear()
            shown = await load_job_response(env, CALLER, job_id)
            taken.append(len(trips))
            return None if shown.latest_run is None else shown.latest_run.stats.total

        assert [await look() for _ in range(3)] == [3, 3, 3]
        trips.clear()
        await load_owned_job_and_run(env, CALLER, job_id)
        assert trips == [2]
        await runs.stop(env, CALLER, job_id)
        await look()

    # The job, its run, and what belongs to it; then all at once. A stopped run has other counters
    # and no work to look at.
    assert taken == [3, 1, 1, 2]
