"""The host limits of a job: stored in the job, and changed by its owner only."""

from __future__ import annotations

import pytest

from conveyor.domain.errors import NotFound
from conveyor.domain.model import HostLimit, HostLimits
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import load_owned_job
from conveyor.usecases.submit import jobs
from conveyor.usecases.submit.jobs import set_host_limits
from tests.builders import CALLER, ManualClock
from tests.usecases.world import OTHER_CALLER, run_of, submit

SLOW = HostLimits(every=HostLimit(concurrency=1))
FAST = HostLimits(every=HostLimit(concurrency=8))


async def test_changed_host_limits_are_stored_in_the_job(env: Context, clock: ManualClock) -> None:
    accepted = await submit(env, 1, host_limits=SLOW)
    clock.advance(1)

    changed = await set_host_limits(env, CALLER, accepted.job.job_id, FAST)

    assert (changed.host_limits, changed.updated_at) == (FAST, env.now())
    assert await load_owned_job(env, CALLER, accepted.job.job_id) == changed
    assert await run_of(env, accepted.run) == accepted.run


async def test_host_limits_can_be_removed(env: Context) -> None:
    accepted = await submit(env, 1, host_limits=SLOW)

    await set_host_limits(env, CALLER, accepted.job.job_id, None)

    assert (await load_owned_job(env, CALLER, accepted.job.job_id)).host_limits is None


async def test_only_the_owner_of_an_existing_job_changes_its_host_limits(env: Context) -> None:
    mine, gone = await submit(env, 1), await submit(env, 1)
    await jobs.delete(env, CALLER, gone.job.job_id)

    with pytest.raises(NotFound):
        await set_host_limits(env, OTHER_CALLER, mine.job.job_id, SLOW)
    with pytest.raises(NotFound):
        await set_host_limits(env, CALLER, gone.job.job_id, SLOW)

    assert (await load_owned_job(env, CALLER, mine.job.job_id)).host_limits is None
