"""Staging: invalid lines refuse a list or become failed tasks, and secrets are stored encrypted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import msgspec
import pytest

from conveyor.domain.changes import BatchKey
from conveyor.domain.errors import InvalidTasks
from conveyor.domain.ids import FIRST_BATCH, BatchId, JobId, RunId
from conveyor.domain.model import Job, RunStatus, StagedList, TaskStatus
from conveyor.domain.run.settlement import Claimed
from conveyor.domain.submit.admission import GrowsTooMuch, TaskDraft
from conveyor.domain.submit.scraper_params import NOT_WITH_POST, Params
from conveyor.ports.errors import BlobMissing
from conveyor.usecases.context import Context
from conveyor.usecases.run import ingest, reconcile, rerun, tasks
from conveyor.usecases.run.ingest import open_batches_of
from conveyor.usecases.submit import jobs, staging
from conveyor.usecases.submit.jobs import Accepted, Submission
from conveyor.usecases.submit.staging import OnInvalid, StreamingValidator
from tests.builders import CALLER
from tests.usecases import world
from tests.usecases.world import LATER_FROM, check_counters, rows_of, run_of, some_drafts, work

BAD = [
    TaskDraft(url="ftp://example.com/"),
    TaskDraft(url=7, external_id="seven"),
    TaskDraft(url="https://example.com/x", external_id="kept", method="PATCH"),
    TaskDraft(url="https://u:secret@example.com/?token"),
]
# One list size for each way of admission: inline, staged and ingested before the answer, and staged
# and ingested after it.
COUNTS = [10, 100, LATER_FROM]


def make_mixed(count: int) -> list[TaskDraft]:
    return [*BAD, *some_drafts(count - len(BAD))]


async def submit(env: Context, drafts: list[TaskDraft], *, is_open: bool = False) -> Accepted:
    request = Submission(drafts=drafts, on_invalid=OnInvalid.SKIP, is_open=is_open)
    return await jobs.submit(env, CALLER, request, job_id=JobId(env.new_id()))


async def ingest_rest(env: Context, accepted: Accepted) -> None:
    for batch in await open_batches_of(env, accepted.job.job_id, accepted.run.run_id):
        await reconcile.finish_batch(env, batch)


@pytest.mark.parametrize("count", COUNTS)
async def test_invalid_lines_of_a_submit_become_failed_tasks_for_every_list_size(
    env: Context, count: int
) -> None:
    accepted = await submit(env, make_mixed(count))
    await ingest_rest(env, accepted)

    totals = await check_counters(env, accepted.run)
    rows = sorted(await rows_of(env, accepted.run), key=lambda row: row.index)
    failed = [row for row in rows if row.status is TaskStatus.FAILED]
    assert (accepted.accepted, totals.admitted, totals.failed) == (count, count, len(BAD))
    assert [row.index for row in failed] == [0, 1, 2, 3]
    assert [row.problem.code for row in failed if row.problem] == [
        "unsupported_scheme",
        "malformed_url",
        "unsupported_method",
        "malformed_url",
    ]
    assert [row.url for row in failed] == [
        "ftp://example.com/",
        "",
        "https://example.com/x",
        "https",
    ]
    assert [row.external_id for row in failed] == [None, "seven", "kept", None]
    assert await work(env, accepted.run) == count - len(BAD)
    assert (await run_of(env, accepted.run)).status is RunStatus.COMPLETED


@pytest.mark.parametrize("count", COUNTS)
async def test_invalid_lines_that_are_added_become_failed_tasks(env: Context, count: int) -> None:
    job = (await submit(env, [], is_open=True)).job

    added = await jobs.add_tasks(
        env,
        CALLER,
        job.job_id,
        make_mixed(count),
        is_last=True,
        batch_id=BatchId("b"),
        on_invalid=OnInvalid.SKIP,
    )
    for batch in await ingest.open_batches_of(env, job.job_id, added.run.run_id):
        await reconcile.finish_batch(env, batch)

    totals = await check_counters(env, added.run)
    assert (added.accepted, totals.admitted, totals.failed) == (count, count, len(BAD))
    assert await work(env, added.run) == count - len(BAD)
    assert (await run_of(env, added.run)).status is RunStatus.COMPLETED


@pytest.mark.parametrize("count", COUNTS)
async def test_a_rerun_refuses_invalid_lines_again_and_fetches_none_of_them(
    env: Context, count: int
) -> None:
    first = await submit(env, make_mixed(count))
    await ingest_rest(env, first)
    await work(env, first.run)

    second = await rerun.rerun(env, CALLER, first.job.job_id, run_id=RunId(env.new_id()))
    for batch in await open_batches_of(env, first.job.job_id, second.run.run_id):
        await reconcile.finish_batch(env, batch)

    assert await work(env, second.run) == count - len(BAD)
    failed = [row for row in await rows_of(env, second.run) if row.status is TaskStatus.FAILED]
    assert sorted(row.index for row in failed) == [0, 1, 2, 3]
    assert all(row.problem is not None and not row.claim for row in failed)
    await check_counters(env, second.run)
    assert (await run_of(env, second.run)).status is RunStatus.COMPLETED


async def test_a_rerun_of_only_invalid_lines_is_complete_at_once(env: Context) -> None:
    first = await submit(env, BAD)

    second = await rerun.rerun(env, CALLER, first.job.job_id, run_id=RunId(env.new_id()))

    assert (await run_of(env, second.run)).status is RunStatus.COMPLETED


async def test_a_job_of_only_invalid_lines_is_complete_at_once(env: Context) -> None:
    accepted = await submit(env, BAD)

    assert accepted.run.status is RunStatus.COMPLETED
    assert (accepted.run.total, accepted.totals.failed) == (len(BAD), len(BAD))


async def test_a_list_with_invalid_lines_is_refused_by_default(env: Context) -> None:
    with pytest.raises(InvalidTasks) as caught:
        await jobs.submit(
            env, CALLER, Submission(drafts=make_mixed(10)), job_id=JobId(env.new_id())
        )

    assert "4 of 10 tasks" in caught.value.detail
    assert [task.index for task in caught.value.invalid_tasks] == [0, 1, 2, 3]


async def test_only_the_first_hundred_invalid_lines_are_listed(env: Context) -> None:
    drafts = [TaskDraft(url="nope")] * 250

    with pytest.raises(InvalidTasks) as refusal:
        await jobs.submit(env, CALLER, Submission(drafts=drafts), job_id=JobId(env.new_id()))

    assert len(refusal.value.invalid_tasks) == 100
    assert "250 of 250" in refusal.value.detail


async def test_secrets_are_encrypted_in_every_row_and_decrypted_for_the_fetch(env: Context) -> None:
    draft = TaskDraft(
        url="https://example.com/",
        method="POST",
        body=msgspec.Raw(b'"CANARY-body"'),
        params={"custom_headers": {"Cookie": "CANARY-task"}},
    )
    request = Submission(
        drafts=[draft, *some_drafts(1)],
        params=Params({"wait": "5"}, {"Authorization": "CANARY-job"}),
        api_key="CANARY-key",
    )

    accepted = await jobs.submit(env, CALLER, request, job_id=JobId(env.new_id()))
    posted, plain = sorted(await rows_of(env, accepted.run), key=lambda row: row.index)

    stored = msgspec.json.encode([accepted.job, posted, plain])
    assert b"CANARY" not in stored
    to_send = tasks.request_for(env, accepted.job, Claimed(posted))
    assert (to_send.headers, to_send.body) == ({"Cookie": "CANARY-task"}, b"CANARY-body")
    assert to_send.auth == "CANARY-key"
    assert to_send.params == {"wait": "5"}
    assert tasks.request_for(env, accepted.job, Claimed(plain)).headers == {
        "Authorization": "CANARY-job"
    }


async def test_a_staged_list_contains_encrypted_secrets_only(env: Context) -> None:
    drafts = [
        TaskDraft(url="https://example.com/", params={"custom_headers": {"Cookie": "CANARY"}})
    ] * 120

    accepted = await jobs.submit(env, CALLER, Submission(drafts=drafts), job_id=JobId(env.new_id()))

    key = f"sources/{accepted.job.job_id}/{accepted.run.run_id}/{FIRST_BATCH}"
    text = b"".join([piece async for piece in env.blobs.open(key)])
    assert text.count(b"\n") == 120
    assert b"CANARY" not in text


async def test_an_encrypted_secret_can_be_decrypted_for_its_own_job_only(env: Context) -> None:
    one, other = await world.submit(env, 1, api_key="k"), await world.submit(env, 1, api_key="k")

    opened = staging.unseal_secrets(env, one.job, "auth", one.job.auth_sealed)

    assert opened.body == b"k"
    with pytest.raises(Exception, match="another place"):
        staging.unseal_secrets(env, other.job, "auth", one.job.auth_sealed)


def validator_for(env: Context, job: Job, drafts: list[TaskDraft]) -> StreamingValidator:
    """A validator that has checked these lines in two calls."""
    validator = StreamingValidator(env, job)
    validator.take(drafts[:2])
    validator.take(drafts[2:])
    return validator


async def test_lines_that_are_validated_in_parts_are_numbered_as_one_list(env: Context) -> None:
    job = (await submit(env, [], is_open=True)).job
    validator = validator_for(env, job, [*some_drafts(3), *BAD])

    with pytest.raises(InvalidTasks) as refusal:
        validator.refuse_invalid(OnInvalid.REJECT, {})

    assert [line.index for line in refusal.value.invalid_tasks] == [3, 4, 5, 6]
    assert "4 of 7 tasks" in refusal.value.detail
    validator.refuse_invalid(OnInvalid.SKIP, {})


async def test_post_lines_are_refused_if_parameters_that_are_known_later_exclude_them(
    env: Context,
) -> None:
    job = (await submit(env, [], is_open=True)).job
    drafts = [*some_drafts(3), TaskDraft(url="https://example.com/", method="POST")]
    validator = validator_for(env, job, drafts)
    excludes_post = dict.fromkeys(NOT_WITH_POST, "true")

    validator.refuse_invalid(OnInvalid.REJECT, {"wait": "5"})
    with pytest.raises(InvalidTasks) as refusal:
        validator.refuse_invalid(OnInvalid.SKIP, excludes_post)

    (line,) = refusal.value.invalid_tasks
    assert (line.index, line.reason) == (3, "method_param_conflict")


async def test_a_list_that_needs_far_more_storage_than_was_sent_is_refused(env: Context) -> None:
    job = (await submit(env, [], is_open=True)).job
    drafts = some_drafts(400)

    with pytest.raises(GrowsTooMuch):
        await staging.check_tasks(env, job, drafts, OnInvalid.REJECT, bytes_sent=1_000)

    assert (
        len(await staging.check_tasks(env, job, drafts, OnInvalid.REJECT, bytes_sent=9_000)) == 400
    )


async def test_a_staged_list_is_deleted_unless_a_batch_refers_to_it(env: Context) -> None:
    accepted = await submit(env, make_mixed(LATER_FROM))
    job, run_id = accepted.job, accepted.run.run_id
    batch = await env.store.read(BatchKey(job.job_id, run_id, FIRST_BATCH))
    unused = staging.staging_key(env, job, run_id, FIRST_BATCH)
    await staging.stage_stream(env, unused, lines_of(b"one", b"two"))
    assert batch is not None
    assert isinstance(batch.source, StagedList)

    for source in (unused, batch.source):
        await staging.delete_if_unreferenced(env, job, source)

    assert await is_stored(env, batch.source.key)
    assert not await is_stored(env, unused.key)


async def lines_of(*lines: bytes) -> AsyncIterator[bytes]:
    for line in lines:
        yield line


async def is_stored(env: Context, key: str) -> bool:
    try:
        async with aclosing(env.blobs.open(key)) as pieces:
            return [piece async for piece in pieces] != []
    except BlobMissing:
        return False
