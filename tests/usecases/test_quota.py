"""Storage quotas: counted from rows, and exceeded by at most one request."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock

from conveyor.domain.errors import Conflict
from conveyor.domain.export_record import ExportFormat
from conveyor.domain.ids import InputId, RunId
from conveyor.domain.model import ListFormat, ListSpec
from conveyor.domain.quota import Quota, QuotaExceeded
from conveyor.usecases import export as exports
from conveyor.usecases.context import Context
from conveyor.usecases.quota import JOB_S, TURN_S, StorageQuotas, Use
from conveyor.usecases.run import runs
from conveyor.usecases.run.rerun import rerun
from conveyor.usecases.submit import jobs, upload
from tests.builders import CALLER, ManualClock
from tests.usecases.world import OTHER_CALLER, PAGE, run_of, submit, work

DAY_S = 86_400.0


def quotas_of(env: Context, **by_name: int | None) -> StorageQuotas:
    return StorageQuotas(env, {Quota(name): limit for name, limit in by_name.items()})


async def is_new() -> None:
    return None


async def is_retry() -> object:
    return "the row of the first attempt"


@asynccontextmanager
async def admit(quotas: StorageQuotas, *by: Quota) -> AsyncGenerator[None, None]:
    async with quotas.admit(CALLER, by, is_new, bytes_sent=100):
        yield


async def test_the_usage_of_a_caller_is_counted_from_its_rows(env: Context) -> None:
    ended = await submit(env, 3)
    await work(env, ended.run)
    await submit(env, 2, is_open=True)
    gone = await submit(env, 7)
    await jobs.delete(env, CALLER, gone.job.job_id)
    quotas = quotas_of(env)

    use = await quotas.count(CALLER)

    stored = 3 * len(PAGE.body)
    assert use == Use(jobs=2, live_runs=1, open_jobs=1, tasks=5, bytes=stored)
    assert await quotas.count(OTHER_CALLER) == Use()


async def test_expired_bodies_do_not_count(env: Context, clock: ManualClock) -> None:
    ended = await submit(env, 3, result_ttl_days=1)
    await work(env, ended.run)

    clock.advance(DAY_S + 1)

    assert (await quotas_of(env).count(CALLER)).bytes == 0


async def test_a_deleted_run_counts_until_its_job_is_counted_again(
    env: Context, autojump_clock: MockClock
) -> None:
    first = await submit(env, 3)
    await work(env, first.run)
    second = await rerun(env, CALLER, first.job.job_id, run_id=RunId(env.new_id()))
    await work(env, second.run)
    quotas = quotas_of(env)
    before = await quotas.count(CALLER)

    await runs.delete_run(env, CALLER, first.job.job_id, first.run.run_id)
    await trio.sleep(JOB_S)

    assert (before.tasks, (await quotas.count(CALLER)).tasks) == (6, 3)


@pytest.mark.parametrize(
    ("quota", "limit"),
    [
        (Quota.LIVE_RUNS, 1),
        (Quota.OPEN_JOBS, 1),
        (Quota.STORED_TASKS, 3),
        (Quota.STORED_BYTES, len(PAGE.body)),
    ],
)
async def test_a_caller_at_its_limit_is_refused_and_one_below_it_is_not(
    env: Context, quota: Quota, limit: int
) -> None:
    accepted = await submit(env, 3, is_open=True)
    await work(env, accepted.run, count=1)

    with pytest.raises(QuotaExceeded, match=f"quota {quota} is used up"):
        async with admit(quotas_of(env, **{quota: limit}), quota):
            pytest.fail("the request was admitted")

    async with admit(quotas_of(env, **{quota: limit + 1}), quota):
        pass


async def test_a_request_is_refused_only_by_the_quotas_that_it_uses(env: Context) -> None:
    await submit(env, 1, is_open=True)
    quotas = quotas_of(env, live_runs=9, open_jobs=1)

    async with admit(quotas, Quota.LIVE_RUNS):
        pass


async def test_a_retry_of_an_accepted_request_is_not_refused(env: Context) -> None:
    await submit(env, 1)
    quotas = quotas_of(env, live_runs=1)

    async with quotas.admit(CALLER, [Quota.LIVE_RUNS], is_retry, bytes_sent=100):
        pass


async def test_near_a_limit_concurrent_requests_of_two_processes_are_admitted_one_at_a_time(
    env: Context, autojump_clock: MockClock
) -> None:
    together = together_max = refused = 0

    async def request(quotas: StorageQuotas) -> None:
        nonlocal together, together_max, refused
        try:
            async with admit(quotas, Quota.LIVE_RUNS):
                together += 1
                together_max = max(together, together_max)
                await trio.sleep(0.2)
                await submit(env, 1)
                together -= 1
        except QuotaExceeded:
            refused += 1

    async with trio.open_nursery() as nursery:
        for process in (quotas_of(env, live_runs=3), quotas_of(env, live_runs=3)):
            for _ in range(4):
                nursery.start_soon(request, process)

    assert (together_max, refused) == (1, 5)
    assert (await quotas_of(env).count(CALLER)).live_runs == 3


async def test_a_request_that_cannot_get_its_turn_may_be_retried(
    env: Context, autojump_clock: MockClock
) -> None:
    here, there = quotas_of(env, live_runs=2), quotas_of(env, live_runs=2)

    async with admit(there, Quota.LIVE_RUNS):
        started_at = trio.current_time()
        with pytest.raises(Conflict) as refusal:
            async with admit(here, Quota.LIVE_RUNS):
                pytest.fail("the request was admitted")
        waited_s = trio.current_time() - started_at

    assert (refusal.value.retry_after_s, waited_s) == (1, TURN_S)
    async with admit(here, Quota.LIVE_RUNS):
        pass


async def test_a_failed_request_releases_its_turn(env: Context) -> None:
    here, there = quotas_of(env, live_runs=1), quotas_of(env, live_runs=1)

    with pytest.raises(ZeroDivisionError):
        async with admit(here, Quota.LIVE_RUNS):
            raise ZeroDivisionError

    with trio.fail_after(TURN_S / 2):
        async with admit(there, Quota.LIVE_RUNS):
            pass


async def test_exports_are_limited_per_run(env: Context) -> None:
    full, other = await submit(env, 1), await submit(env, 1)
    for accepted in (full, other):
        await work(env, accepted.run)
    run = await run_of(env, full.run)
    await exports.start(
        env, CALLER, run.job_id, run.run_id, ExportFormat.JSONL, export_id=env.new_id()
    )
    quotas = quotas_of(env, exports_per_run=1)

    with pytest.raises(QuotaExceeded, match="exports_per_run"):
        async with quotas.admit_export(CALLER, run.run_id, is_new):
            pytest.fail("the export was admitted")

    async with quotas.admit_export(CALLER, other.run.run_id, is_new):
        pass
    async with quotas.admit_export(CALLER, run.run_id, is_retry):
        pass


async def test_file_inputs_are_limited_per_caller(env: Context) -> None:
    await upload.create(env, CALLER, ListSpec(ListFormat.TEXT), input_id=InputId(env.new_id()))
    quotas = quotas_of(env, upload_slots=1)

    with pytest.raises(QuotaExceeded, match="upload_slots"):
        async with quotas.admit_slot(CALLER, is_new):
            pytest.fail("the file input was admitted")

    async with quotas.admit_slot(OTHER_CALLER, is_new):
        pass
    assert (await quotas.count_slots(CALLER), await quotas.count_slots(OTHER_CALLER)) == (1, 0)
