"""Admission: validates the lines of a list, chooses how the list is stored, and builds the change
that makes it part of a run (SPEC.md 4.1).

An admitted list is durable before the response: a small one is part of the first transaction, and
an open batch points at a larger one, which is staged as a blob.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TypeVar

import msgspec

from conveyor.domain import event_log, lifecycle, limits
from conveyor.domain.budget import Budget, BudgetCap
from conveyor.domain.changes import (
    BatchKey,
    BudgetKey,
    Change,
    Enqueue,
    Guard,
    Insert,
    JobKey,
    OpenQueue,
    RunKey,
    StatsKey,
    TaskKey,
    Update,
    Write,
)
from conveyor.domain.errors import InvalidTask, Refused, make_problem
from conveyor.domain.ids import BatchId, RunId, TaskId, shards_of, task_ids
from conveyor.domain.lifecycle import (
    ACCEPTS_LISTS,
    JOB,
    JOB_VISIBLE,
    SETTLES_PASS,
    TASK_TERMINAL,
    JobEvent,
)
from conveyor.domain.model import (
    Batch,
    BatchStatus,
    CounterState,
    EventType,
    FailureReason,
    Job,
    Method,
    Problem,
    Run,
    RunStatus,
    ShardCounters,
    Source,
    Task,
    TaskRef,
    TaskSpec,
    TaskStatus,
)
from conveyor.domain.submit.scraper_params import (
    NOT_WITH_POST,
    GatewaySupport,
    InvalidParam,
    ParamInput,
    check_params,
)
from conveyor.domain.submit.target import BadUrl, TargetPolicy, parse_url


class AdmissionMode(Enum):
    """How a list gets into its run."""

    AT_ONCE = "in the first transaction"
    INLINE = "staged, and ingested before the answer"
    LATER = "staged, and ingested after the answer"


def choose_path(tasks_count: int, *, at_once_max: int, sync_max: int) -> AdmissionMode:
    if tasks_count >= sync_max:
        return AdmissionMode.LATER
    return AdmissionMode.AT_ONCE if tasks_count <= at_once_max else AdmissionMode.INLINE


class Identity(msgspec.Struct, frozen=True):
    """The id of a line's task, and that of its original if the line is a duplicate."""

    task_id: TaskId
    duplicate_of: TaskId | None = None


def identities_by_index(specs: Sequence[TaskSpec], origin: tuple[RunId, BatchId]) -> list[Identity]:
    """The identities of lines that are no duplicates."""
    return [Identity(task_id) for task_id in task_ids(*origin, [spec.index for spec in specs])]


def make_tasks(
    specs: Sequence[TaskSpec],
    origin: tuple[RunId, BatchId],
    run: Run,
    now: float,
    identities: Sequence[Identity] | None = None,
) -> list[Task]:
    """The rows of these lines. An invalid line is a task that has failed already.

    Without `identities`, each line is fetched by itself.
    """
    lines = identities_by_index(specs, origin) if identities is None else identities
    shards = shards_of([line.task_id for line in lines], run.shard_count)
    return [
        Task(
            run_id=run.run_id,
            task_id=line.task_id,
            shard=shard,
            batch_id=origin[1],
            index=spec.index,
            url=spec.url,
            method=spec.method,
            external_id=spec.external_id,
            metadata=spec.metadata,
            params=spec.params,
            sealed=spec.sealed,
            status=TaskStatus.FAILED if spec.problem else TaskStatus.PENDING,
            problem=spec.problem,
            reason=FailureReason.BAD_TARGET if spec.problem else None,
            created_at=now,
            updated_at=now,
            duplicate_of=line.duplicate_of,
        )
        for spec, line, shard in zip(specs, lines, shards, strict=True)
    ]


def make_ref(run: Run, task: Task) -> TaskRef:
    return TaskRef(run.job_id, run.run_id, task.task_id, task.shard)


def make_batch(
    run: Run, batch_id: BatchId, source: Source | None, *, total: int, now: float
) -> Batch:
    """The record of a list: sealed when it goes in at once, else open until it is ingested."""
    return Batch(
        job_id=run.job_id,
        run_id=run.run_id,
        batch_id=batch_id,
        status=BatchStatus.OPEN if source else BatchStatus.SEALED,
        source=source,
        total=total,
        done=0 if source else total,
        created_at=now,
        updated_at=now,
    )


def counts_of(tasks: Sequence[Task]) -> dict[int, dict[str, int]]:
    """What these new rows add to each shard's counters."""
    admitted = Counter(task.shard for task in tasks)
    counts = {shard: Counter(admitted=count) for shard, count in admitted.items()}
    for task in tasks:
        if task.status in TASK_TERMINAL:
            counts[task.shard].update(("done", task.status.value))
        if task.status is TaskStatus.FAILED:
            counts[task.shard][(task.reason or FailureReason.BAD_TARGET).value] += 1
    return {shard: dict(count) for shard, count in counts.items()}


def make_run_row(job: Job, run_id: RunId, *, sequence: int, now: float) -> Run:
    """Makes a run with what every new run takes from its job. The caller adds what its list is."""
    return Run(
        job_id=job.job_id,
        run_id=run_id,
        caller=job.caller,
        sequence=sequence,
        status=RunStatus.RUNNING,
        created_at=now,
        updated_at=now,
        # Pinned on the job. A replay reads the rows of the last run shard by shard.
        shard_count=job.shard_count,
        # The job's current budget: it may have been changed since the last run began.
        budget=job.budget,
    )


def new_job(job: Job, run: Run, batch: Batch | None, tasks: Sequence[Task]) -> Change:
    """Creates a job with its first run, and its first list if the request has one."""
    batches = [batch] if batch is not None else []
    return Change(
        (
            Insert(JobKey(job.job_id), job),
            *_run_writes(run, batches, tasks),
            event_log.of_job(job, EventType.JOB_CREATED, now=job.created_at),
            _run_created(run),
        ),
        (OpenQueue(run.run_id), *_enqueue(run, tasks)),
    )


def new_run(job: Job, run: Run, batches: Sequence[Batch], tasks: Sequence[Task]) -> Change:
    """Creates a further run of a job without a live run, and closes the job."""
    # The status as it was read, so that only the change that closes the job reports it.
    guard = Guard(
        status_in=JOB_VISIBLE & {job.status},
        equals=(("active_run_id", None), ("runs_count", run.sequence - 1)),
    )
    values = {
        "status": lifecycle.target(JOB, JobEvent.CLOSED),
        "active_run_id": run.run_id,
        "latest_run_id": run.run_id,
        "updated_at": run.created_at,
    }
    update = Update(JobKey(job.job_id), guard, values, {"runs_count": 1})
    events = [_run_created(run), *event_log.closed_event(job, now=run.created_at)]
    return Change(
        (update, *_run_writes(run, batches, tasks), *events),
        (OpenQueue(run.run_id), *_enqueue(run, tasks)),
    )


def _run_created(run: Run) -> Insert:
    return event_log.of_run(
        run, EventType.RUN_CREATED, now=run.created_at, total=run.planned, rerun_of=run.rerun_of
    )


def add_batch(
    job: Job, run: Run, batch: Batch, tasks: Sequence[Task], *, is_last: bool, now: float
) -> Change:
    """Adds one more list to an open job. A concurrent close and a second attempt with the same list
    exclude it: one of the two is refused."""
    job_values: dict[str, object] = {"updated_at": now}
    run_values: dict[str, object] = {"updated_at": now}
    if is_last:
        job_values |= {"status": lifecycle.target(JOB, JobEvent.CLOSED)}
        run_values |= {"last_batch_received": True}
    is_open = batch.status in lifecycle.BATCH_UNFINISHED
    deltas = {"planned": batch.total, "batches_seq": 1}
    deltas |= {"open_batches": 1} if is_open else {"total": batch.total}
    writes: list[Write] = [
        Update(
            JobKey(job.job_id), Guard(status_in=lifecycle.sources(JOB, JobEvent.CLOSED)), job_values
        ),
        Update(RunKey(run.job_id, run.run_id), ACCEPTS_LISTS, run_values, deltas),
        _batch_insert(batch),
        *_task_inserts(run, tasks),
    ]
    writes += [
        Update(StatsKey(run.job_id, run.run_id, shard), Guard(status_in=SETTLES_PASS), {}, counts)
        for shard, counts in counts_of(tasks).items()
    ]
    if is_last:
        writes += event_log.closed_event(job, now=now)
    return Change(tuple(writes), _enqueue(run, tasks))


def _run_writes(run: Run, batches: Sequence[Batch], tasks: Sequence[Task]) -> list[Write]:
    counts = counts_of(tasks)
    writes: list[Write] = [Insert(RunKey(run.job_id, run.run_id), run)]
    if run.budget is not None:
        writes.append(_budget_insert(run, run.budget))
    for shard in range(run.shard_count):
        stats = ShardCounters(
            job_id=run.job_id, run_id=run.run_id, shard=shard, status=CounterState.OPEN
        )
        seeded = msgspec.structs.replace(stats, **counts.get(shard, {}))
        writes.append(Insert(StatsKey(run.job_id, run.run_id, shard), seeded))
    writes += [_batch_insert(batch) for batch in batches]
    return [*writes, *_task_inserts(run, tasks)]


def _budget_insert(run: Run, cap: BudgetCap) -> Insert:
    budget = Budget(run.job_id, run.run_id, cap.unit, cap=cap.amount, left=cap.amount)
    return Insert(BudgetKey(run.job_id, run.run_id), budget)


def _batch_insert(batch: Batch) -> Insert:
    return Insert(BatchKey(batch.job_id, batch.run_id, batch.batch_id), batch)


def _task_inserts(run: Run, tasks: Sequence[Task]) -> list[Insert]:
    return [
        Insert(TaskKey(run.job_id, run.run_id, task.task_id, task.shard), task) for task in tasks
    ]


def _enqueue(run: Run, tasks: Sequence[Task]) -> tuple[Enqueue, ...]:
    refs = tuple(make_ref(run, task) for task in tasks if task.status not in TASK_TERMINAL)
    return (Enqueue(refs),) if refs else ()


# Validation: which lines of a list are tasks, and what is wrong with the others (docs/api.md,
# Submitting lists).


T = TypeVar("T")

EXTERNAL_ID_PATTERN = f"^[A-Za-z0-9._-]{{1,{limits.EXTERNAL_ID_CHARS_MAX}}}$"

# Matched as a whole: in Python `$` also matches before a last line break.
_EXTERNAL_ID = re.compile(EXTERNAL_ID_PATTERN)
_FORM = "application/x-www-form-urlencoded"


class TaskDraft(msgspec.Struct, frozen=True, kw_only=True):
    """One line as a caller wrote it; `flaw` when it could not even be read."""

    url: object
    external_id: object = None
    metadata: object = None
    method: object = None
    body: msgspec.Raw | None = None
    params: object = None
    flaw: str | None = None


class Secrets(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a task or job carries that must be sealed before it is stored."""

    headers: dict[str, str] | None = None
    body: bytes | None = None
    content_type: str | None = None


class Refusal(Exception):
    """This line is no task; the contract's reason, and a shortened look at what is wrong."""

    def __init__(self, reason: str, value: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.value = value


def check_task(
    index: int,
    draft: TaskDraft,
    job_params: Mapping[str, str],
    targets: TargetPolicy | None,
    support: GatewaySupport,
) -> tuple[TaskSpec, Secrets | None]:
    """One good line, with its secrets apart; Refusal for a bad one.

    `targets` is what we may reach ourselves; None when a gateway elsewhere does the fetching.
    `support` says which parameters the gateway honours.
    """
    if draft.flaw is not None:
        raise Refusal(draft.flaw)
    url = _check_url(draft.url, targets)
    params, headers = _check_task_params(draft.params, job_params, support)
    method = Method.GET
    if draft.method is not None:
        method = _check_method(draft.method, {**job_params, **(params or {})})
    body, content_type = _check_body(draft.body, method)
    spec = TaskSpec(
        index=index,
        url=url,
        method=method,
        external_id=_check_external_id(draft.external_id),
        metadata=check_metadata(draft.metadata),
        params=params,
    )
    secrets = None
    if headers is not None or body is not None:
        secrets = Secrets(headers=headers, body=body, content_type=content_type)
    _check_size(spec, headers, body)
    return spec, secrets


def _check_size(spec: TaskSpec, headers: dict[str, str] | None, body: bytes | None) -> None:
    """Engines write many tasks in one transaction, and a transaction has its limits."""
    brought = sum(_bytes_of(texts) for texts in (spec.metadata, spec.params, headers) if texts)
    if brought + len(body or b"") + len(spec.url.encode()) > limits.TASK_BYTES_MAX:
        raise Refusal("task_too_large")


def _bytes_of(texts: Mapping[str, str]) -> int:
    return sum(len(key.encode()) + len(value.encode()) for key, value in texts.items())


def invalid_task(index: int, refusal: Refusal) -> InvalidTask:
    return InvalidTask(index=index, reason=refusal.reason, value=refusal.value)


def refused_task(
    index: int, draft: TaskDraft, refusal: Refusal, targets: TargetPolicy | None
) -> TaskSpec:
    """A bad line as the failed task it becomes, with whatever of it is fit to be kept."""
    url = _if_good(lambda: _check_url(draft.url, targets))
    return TaskSpec(
        index=index,
        url=url or (_shorten(draft.url) if isinstance(draft.url, str) else ""),
        external_id=_if_good(lambda: _check_external_id(draft.external_id)),
        metadata=_if_good(lambda: check_metadata(draft.metadata)),
        problem=_problem_of(refusal),
    )


def _if_good(check: Callable[[], T]) -> T | None:
    try:
        return check()
    except Refusal:
        return None


def _problem_of(refusal: Refusal) -> Problem:
    detail = f"It was refused: {refusal.reason}"
    detail += f", {refusal.value}." if refusal.value else "."
    storable = detail.encode(errors="replace").decode()
    return make_problem(refusal.reason, "The line is no valid task", 400, storable)


def _check_url(url: object, targets: TargetPolicy | None) -> str:
    if not isinstance(url, str):
        raise Refusal("malformed_url")
    target = parse_url(url)
    if isinstance(target, BadUrl):
        raise Refusal(target.reason, _shorten(url))
    if targets is not None and targets.forbids_target(target) is not None:
        raise Refusal("forbidden_target", _shorten(url))
    return url


def _shorten(url: str) -> str:
    """Enough of a bad URL to find it; no query, where tokens live, and nothing unprintable."""
    head = url[:100].partition("?")[0]
    if "@" in url.partition("?")[0]:
        head = head.partition("://")[0]
    head = head.encode("ascii", errors="backslashreplace").decode()
    return "".join(
        character if character.isprintable() else f"\\x{ord(character):02x}" for character in head
    )


def _check_task_params(
    value: object, job_params: Mapping[str, str], support: GatewaySupport
) -> tuple[dict[str, str] | None, dict[str, str] | None]:
    if value is None:
        return None, None
    if not isinstance(value, dict):
        raise Refusal("invalid_param_value", "zenrows_params")
    params: ParamInput = value
    try:
        checked = check_params(params)
        support.check(checked.values, job_params)
    except InvalidParam as error:
        raise Refusal(error.reason, error.key[:64]) from error
    return checked.values or None, checked.headers


def _check_method(value: object, params: Mapping[str, str]) -> Method:
    name = value.upper() if isinstance(value, str) else ""
    if name not in Method.__members__:
        raise Refusal("unsupported_method", str(value)[:20])
    method = Method(name)
    clash = sorted(NOT_WITH_POST & params.keys())
    if method is Method.POST and clash:
        raise Refusal("method_param_conflict", clash[0])
    return method


def _check_body(raw: msgspec.Raw | None, method: Method) -> tuple[bytes | None, str | None]:
    if raw is None or bytes(raw) == b"null":
        return None, None
    if method is not Method.POST:
        raise Refusal("body_not_allowed")
    if len(bytes(raw)) > limits.TASK_BODY_BYTES_MAX:
        raise Refusal("body_too_large")
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Refusal("body_malformed") from None
    if isinstance(value, str):
        return value.encode(errors="replace"), _FORM
    return bytes(raw), "application/json"


def _check_external_id(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or _EXTERNAL_ID.fullmatch(value) is None:
        raise Refusal("invalid_external_id", str(value)[:64])
    return value


def check_metadata(metadata: object) -> dict[str, str] | None:
    if metadata is None:
        return None
    if not isinstance(metadata, dict) or len(metadata) > limits.METADATA_KEYS_MAX:
        raise Refusal("metadata_too_large")
    for key, value in metadata.items():
        if not key or len(key) > limits.METADATA_KEY_CHARS_MAX or not key.isprintable():
            raise Refusal("metadata_key_invalid", key[:64])
        if not isinstance(value, str) or len(value) > limits.METADATA_VALUE_CHARS_MAX:
            raise Refusal("metadata_too_large", key[:64])
        if not _is_storable(value) or not _is_storable(key):
            raise Refusal("metadata_key_invalid", key[:64].encode(errors="replace").decode())
    if _bytes_of(metadata) > limits.METADATA_BYTES_MAX:
        raise Refusal("metadata_too_large")
    return metadata or None


def _is_storable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# The disk space of one short admitted line with its message, and of one invalid line with its
# problem (embedded engine: 333 and 640 bytes).
TASK_BYTES = 340
BAD_TASK_BYTES = 650
GROWTH_MAX = 100
# A list of one or two hundred lines is never refused: its job and run alone need some kilobytes.
GROWTH_FREE_BYTES = 100_000


class GrowsTooMuch(Refused):
    """The request would need far more storage than its own size."""

    status = 413
    code = "request_too_large"
    title = "Request too large"


def grows_too_much(sent_bytes: int, *, tasks_count: int, bad_count: int) -> bool:
    """Returns whether a list needs more than 100 times the bytes that were sent."""
    stored_bytes = (tasks_count - bad_count) * TASK_BYTES + bad_count * BAD_TASK_BYTES
    return stored_bytes > max(GROWTH_MAX * sent_bytes, GROWTH_FREE_BYTES)


def check_growth(sent_bytes: int, *, tasks_count: int, bad_count: int) -> None:
    if grows_too_much(sent_bytes, tasks_count=tasks_count, bad_count=bad_count):
        raise GrowsTooMuch(
            f"{tasks_count:,} lines in {sent_bytes:,} bytes would take up more than {GROWTH_MAX} "
            "times as much on disk; leave out lines that are not valid, and send a list that long "
            "without compression."
        )
