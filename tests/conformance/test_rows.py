"""The laws of Store.read: every kind of row is read back as it was written (docs/engines.md)."""

from __future__ import annotations

import msgspec
import pytest

from conveyor.domain.budget import BudgetCap, Unit
from conveyor.domain.changes import Applied, BatchKey, Row, RunKey, StatsKey
from conveyor.domain.crawl_record import CrawlEnd, CrawlRules, CrawlStatus, Discovery
from conveyor.domain.export_record import ExportFormat, ExportOrder, ExportStatus, Manifest
from conveyor.domain.ids import FIRST_BATCH, BatchId, ExportId, TaskId
from conveyor.domain.model import (
    Attempt,
    BatchStatus,
    DeliveryAttempt,
    FailureReason,
    Format,
    HostLimit,
    HostLimits,
    IngestStatus,
    JobStatus,
    JobType,
    ListFormat,
    ListSpec,
    Method,
    NoticeChannel,
    NoticeStatus,
    PauseState,
    Problem,
    Result,
    RowsOf,
    RunFailure,
    RunStatus,
    SigningKey,
    StagedList,
    TaskStatus,
    Webhook,
)
from conveyor.domain.schedule import (
    At,
    Calendar,
    Cron,
    Overlap,
    ScheduleStatus,
    Skip,
    SkipReason,
)
from conveyor.ports.store import Store
from tests.builders import (
    JOB,
    OTHER_JOB,
    OTHER_RUN,
    RUN,
    T0,
    a_batch,
    a_budget,
    a_change,
    a_crawl,
    a_crawl_step,
    a_crossing,
    a_deletion_intent,
    a_feed,
    a_job,
    a_notice,
    a_record,
    a_run,
    a_sample,
    a_schedule,
    a_share,
    a_stats,
    a_task,
    a_ulid,
    an_event,
    an_export,
    an_input,
    insert,
    keep,
    kept,
    key_of,
    some_keys,
    update,
)

PROBLEM = Problem(
    type="about:blank", title="Blocked", status=403, code="blocked", detail="no", instance="/x"
)
RESULT = Result("jobs/1/body", 12, "ab" * 32, "text/html; charset=utf-8", 200)
BUDGET = BudgetCap(Unit.COST, 12_500_000)
HOST_LIMITS = HostLimits(HostLimit(2, 0.5), {"example.com": HostLimit(rate_per_s=5.0)})
HISTORY = (Attempt(1, T0, T0 + 1.5, PROBLEM, 1, 25), Attempt(2, T0 + 2, T0 + 3))
STAGED = StagedList("staged/list", RUN, FIRST_BATCH)
REPLAY = RowsOf(RUN, frozenset({TaskStatus.FAILED, TaskStatus.PENDING}), FIRST_BATCH)

MANIFEST = Manifest(
    export_id=ExportId("1"),
    job_id=JOB,
    run_id=RUN,
    format=ExportFormat.WARC,
    created_at=T0,
    tasks=5,
    entries=4,
    counts={"successful": 3, "failed": 1},
    body_bytes=12,
    entries_sha256="cd" * 32,
)

CRAWL_RULES = CrawlRules(
    depth=3,
    max_items=7,
    max_pages=9,
    max_hosts=2,
    max_seconds=60,
    include=("/ä",),
    exclude=("'", '"'),
    discovery=(Discovery.SITEMAP, Discovery.LINKS),
    sitemaps=("https://example.com/sitemap.xml",),
    obeys_robots=False,
    follows_canonical=False,
    output=Format.MARKDOWN,
    page_params={"js_render": "true"},
)

BARE: list[Row] = [
    a_job(),
    a_run(),
    a_batch(),
    a_stats(),
    a_task(),
    a_record(),
    a_notice(),
    a_crossing(),
    a_deletion_intent(),
    an_event(),
    a_feed(),
    some_keys(),
    a_schedule(),
    an_export(),
    an_input(),
    a_budget(),
    a_share(),
    a_sample(),
    a_crawl(),
    a_crawl_step(),
]
FULL: list[Row] = [
    a_job(
        status=JobStatus.CLOSED,
        updated_at=T0 + 0.125,
        format=Format.MARKDOWN,
        params={"js_render": "true", "empty": ""},
        headers_sealed="v1.headers",
        auth_sealed="v1.auth",
        external_id="Zoë's list",
        name="名前 🚚 'quoted' \"twice\"",
        metadata={"ключ": "значение"},
        webhook=Webhook("https://example.com/hook", signature=True),
        max_inflight=7,
        max_attempts=2,
        priority=9,
        result_ttl_days=3,
        shard_count=8,
        runs_count=3,
        latest_run_id=RUN,
        active_run_id=RUN,
        type=JobType.SCHEDULED,
        budget=BUDGET,
        host_limits=HOST_LIMITS,
        task_token_sealed="v1.token",
        dedup=True,
    ),
    a_run(
        status=RunStatus.FAILED,
        sequence=4,
        shard_count=8,
        pause_state=PauseState.PAUSED,
        planned=1_000_001,
        total=1_000_000,
        open_batches=2,
        batches_seq=3,
        last_batch_received=True,
        ingest_status=IngestStatus.DONE,
        stop_requested_at=T0 + 1.25,
        stop_reason="asked",
        failure_reason=RunFailure.INSUFFICIENT_CREDITS,
        failure_detail="none left",
        rerun_of=OTHER_RUN,
        retried=12,
        source_run_ids=(OTHER_RUN, RUN),
        ended_at=T0 + 9,
        scheduled_for=T0 - 60,
        expires_at=T0 + 99,
        sweep_at=T0 + 100,
        budget=BUDGET,
        queue_closed=True,
        sampled_at=T0 + 8.5,
        sampled_done=7,
    ),
    a_batch(
        status=BatchStatus.SEALED,
        total=10,
        source=STAGED,
        epoch=3,
        done=7,
        cursor="after-7",
        failures=1,
        source_run_ids=(OTHER_RUN,),
    ),
    a_batch(batch_id=BatchId("replay"), source=REPLAY),
    a_stats(
        3,
        admitted=20,
        done=16,
        successful=9,
        failed=7,
        auth_failed=1,
        blocked=1,
        bad_target=1,
        rate_limited=1,
        timeout=1,
        gateway_error=1,
        other=1,
        credits=250,
        cost_micros=2**53,
        retrying=17,
        stored_bytes=2**40,
    ),
    a_task(
        5,
        shard=3,
        status=TaskStatus.FAILED,
        method=Method.POST,
        external_id="five",
        metadata={},
        params={"premium_proxy": "true"},
        sealed="v1.sealed",
        claim=4,
        claim_until=T0 + 90.5,
        attempts=2,
        handed_back=1,
        started_at=T0 + 0.5,
        result=RESULT,
        problem=PROBLEM,
        reason=FailureReason.BLOCKED,
        history=HISTORY,
        credits=5,
        cost_micros=125,
        source_run_id=OTHER_RUN,
        duplicate_of=TaskId("ab" * 16),
    ),
    a_record(response_status=201, response_body='{"job_id":"1"}\n'),
    a_notice(
        status=NoticeStatus.EXHAUSTED,
        attempts=9,
        last_error="timeout",
        payload='{"a":"é"}',
        claim=10,
        tries=(DeliveryAttempt(T0, 15.0, None, "timeout"), DeliveryAttempt(T0 + 5.25, 0.5, 200)),
        channel=NoticeChannel.STEP_FUNCTIONS,
    ),
    a_deletion_intent(run_id=RUN, shard_count=8, passes_left=1, due_at=T0 + 0.75),
    an_event(job_id=OTHER_JOB, run_id=RUN, seq=7, data='{"a":"é"}'),
    some_keys(version=2, candidate=SigningKey(a_ulid(8), T0 + 0.5, "v1.other")),
    a_schedule(
        status=ScheduleStatus.PAUSED,
        rule=Calendar(("09:00", "18:30"), "Europe/Berlin", weekdays=("mon",), month_days=(31,)),
        overlap=Overlap.QUEUE,
        version=7,
        last_fire_at=T0 - 60,
        skips=(Skip(T0, T0 + 1, SkipReason.MISSED), Skip(T0, T0, SkipReason.OVERLAP)),
    ),
    a_schedule(OTHER_JOB, rule=At("2026-09-01T09:00:00", "UTC"), next_fire_at=None),
    a_schedule(OTHER_JOB, rule=Cron("*/5 * * * *", "Asia/Kolkata")),
    an_export(
        format=ExportFormat.WARC,
        status=ExportStatus.COMPLETED,
        done=5,
        epoch=2,
        failures=1,
        error="storage is full",
        key="jobs/1/exports/2/3/1",
        size_bytes=2**40,
        sha256="ab" * 32,
        manifest=MANIFEST,
        order=ExportOrder.LIST,
        destination="https://bucket.example/key",
        destination_sealed="v1.destination",
    ),
    an_input(spec=ListSpec(ListFormat.CSV, "link", 3, header=True, quote="'")),
    a_budget(unit=Unit.COST, cap=2**53, left=-7),
    a_share(taken=2**53, seq=9),
    a_sample(
        2**31,
        successful=2**53,
        reasons={"timeout": 7},
        stored_bytes=2**53,
        credits=3,
        cost_micros=2**40,
    ),
    a_crawl(
        status=CrawlStatus.STOPPED,
        rules=CRAWL_RULES,
        due_at=T0 + 0.25,
        version=7,
        steps=3,
        read_to=2,
        waiting=4,
        pages=2**31,
        fetched=2**31,
        failed=2,
        items=3,
        duplicates=2**40,
        hosts=("example.com", "www.example.com"),
        cut_task=TaskId("ab" * 16),
        cut_at=17,
        is_cut_off=True,
        ended_by=CrawlEnd.MAX_ITEMS,
        error_code="seed_unreachable",
        error_detail="the page 'x'",
        finished_at=T0 + 9,
    ),
    a_crawl_step(2**31, items=(TaskId("cd" * 16),)),
]


def _name(row: object) -> str:
    return type(row).__name__


def _encode(row: object) -> bytes:
    """Encodes sets in a fixed order, whatever the hash seed."""
    return msgspec.json.encode(row, order="deterministic")


def test_the_sample_rows_cover_every_optional_field() -> None:
    for kind in {type(row) for row in FULL}:
        rows = [row for row in FULL if type(row) is kind]
        for field in msgspec.structs.fields(kind):
            if not field.required:
                assert any(getattr(row, field.name) != field.default for row in rows), field.name


@pytest.mark.parametrize("row", [*BARE, *FULL], ids=_name)
async def test_an_applied_row_is_read_back_as_it_was_written(store: Store, row: Row) -> None:
    verdicts = await store.commit([a_change(insert(row))])

    assert verdicts == [Applied((row,))]
    stored_row = await kept(store, row)
    assert stored_row == row
    assert _encode(stored_row) == _encode(
        row
    )  # The encoding is compared too, because 1 and 1.0 are equal.


@pytest.mark.parametrize("row", BARE, ids=_name)
async def test_an_unused_key_reads_as_none(store: Store, row: Row) -> None:
    assert await kept(store, row) is None


async def test_a_row_is_found_under_its_own_job_only(store: Store) -> None:
    await keep(store, a_run(), a_batch(), a_stats())

    assert await store.read(RunKey(OTHER_JOB, RUN)) is None
    assert await store.read(BatchKey(OTHER_JOB, RUN, FIRST_BATCH)) is None
    assert await store.read(StatsKey(OTHER_JOB, RUN, 0)) is None


async def test_rows_of_the_same_id_in_different_runs_are_different_rows(store: Store) -> None:
    here, there = a_task(url="https://here.example"), a_task(url="https://there.example")
    there = msgspec.structs.replace(there, run_id=OTHER_RUN)

    await keep(store, here, there)

    assert await store.read(key_of(here)) == here
    assert await store.read(key_of(there)) == there


async def test_an_update_takes_values_of_every_shape(store: Store) -> None:
    await keep(store, a_task(problem=PROBLEM), a_batch(), a_run())

    await store.commit(
        [
            a_change(
                update(a_task(), result=RESULT, history=HISTORY, problem=None, metadata={"a": "b"}),
                update(a_batch(), source=REPLAY, source_run_ids=(OTHER_RUN,)),
                update(a_run(), last_batch_received=True, ended_at=T0 + 1),
            )
        ]
    )

    task = a_task(result=RESULT, history=HISTORY, metadata={"a": "b"})
    assert await store.read(key_of(a_task())) == task
    batch = a_batch(source=REPLAY, source_run_ids=(OTHER_RUN,))
    assert await store.read(key_of(a_batch())) == batch
    run = a_run(last_batch_received=True, ended_at=T0 + 1)
    assert await store.read(key_of(a_run())) == run
