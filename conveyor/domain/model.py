"""The values that Conveyor stores: Job, Run, Batch, Task, Stats and their companions (SPEC.md 2;
docs/storage.md).

Rows are frozen msgspec structs: building one costs about a tenth of a frozen dataclass, and the
settle path builds several per task. Instants are epoch seconds; money is millionths.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from conveyor.domain import limits
from conveyor.domain.budget import BudgetCap
from conveyor.domain.ids import BatchId, CallerId, EventId, InputId, JobId, NoticeId, RunId, TaskId


class JobType(StrEnum):
    """What starts the runs of a job."""

    REGULAR = "regular"  #: The submit, and reruns.
    SCHEDULED = "scheduled"  #: A schedule, and reruns.
    CRAWL = "crawl"  #: A crawl, which also adds the lists; and reruns.


class JobStatus(StrEnum):
    """Whether a job accepts further lists."""

    OPEN = "open"  #: The job accepts further lists.
    CLOSED = "closed"  #: The list of the job is complete.
    DELETED = "deleted"  #: The job is deleted; callers do not see it.


class RunStatus(StrEnum):
    """The state of a run."""

    RUNNING = "running"  #: The run has tasks that have not ended.
    PENDING = "pending"  #: Every task has ended, and further lists may follow.
    COMPLETED = "completed"  #: Every task has ended.
    STOPPED = "stopped"  #: The run was stopped before every task had ended.
    FAILED = "failed"  #: An account-level error ended the run.
    DELETED = "deleted"  #: The run is deleted; callers do not see it.


class TaskStatus(StrEnum):
    PENDING = "pending"
    PROCESSING = "processing"
    SUCCESSFUL = "successful"
    FAILED = "failed"


class BatchStatus(StrEnum):
    OPEN = "open"
    SEALED = "sealed"
    ABANDONED = "abandoned"


class CounterState(StrEnum):
    """Which changes the counters of a run accept: all, releases only, or none."""

    OPEN = "open"
    DRAINING = "draining"
    CLOSED = "closed"


class NoticeStatus(StrEnum):
    """The state of a delivery."""

    DUE = "due"  #: An attempt is due, or in progress.
    DELIVERED = "delivered"  #: The receiver answered with 2xx.
    EXHAUSTED = "exhausted"  #: No attempt was successful, and no further one follows.
    DROPPED = "dropped"  #: The webhook was removed before the event was delivered.


class NoticeChannel(StrEnum):
    """The channel that delivers a notice."""

    WEBHOOK = "webhook"  #: A POST to the webhook of the job.
    STEP_FUNCTIONS = "step_functions"  #: A call to AWS Step Functions.


class EventType(StrEnum):
    """What an event reports."""

    JOB_CREATED = "job.created"  #: A job was submitted.
    JOB_CLOSED = "job.closed"  #: An open job takes no further list.
    JOB_DELETED = "job.deleted"  #: A job was deleted.
    RUN_CREATED = "run.created"  #: A run was created by a submit, a rerun or a schedule.
    RUN_PAUSED = "run.paused"  #: A run was paused.
    RUN_RESUMED = "run.resumed"  #: A paused run was resumed.
    RUN_COMPLETED = "run.completed"  #: A run ended with every task ended.
    RUN_STOPPED = "run.stopped"  #: A run was stopped before every task ended.
    RUN_FAILED = "run.failed"  #: A run ended because of an account-level error.
    RUN_DELETED = "run.deleted"  #: A run was deleted.
    INGEST_DONE = "ingest.done"  #: A list that was ingested after the response is complete.


class PauseState(StrEnum):
    """Whether a run is paused."""

    ACTIVE = "active"  #: The run is not paused.
    PAUSED = "paused"  #: No task of the run is started.


class IngestStatus(StrEnum):
    """The state of a list that is ingested after the response."""

    PENDING = "pending"  #: The list is being ingested.
    DONE = "done"  #: Every line is a task.


class Method(StrEnum):
    """The method of a fetch."""

    GET = "GET"  #: Without a body.
    POST = "POST"  #: With the body of the line.


class Format(StrEnum):
    """The format of the bodies of a job."""

    HTML = "html"  #: The page as the site sends it.
    JSON = "json"  #: Extracted data, or a JSON response of the gateway.
    MARKDOWN = "markdown"  #: The page as Markdown.
    PLAINTEXT = "plaintext"  #: The text of the page.
    PDF = "pdf"  #: The page as PDF.


class FailureReason(StrEnum):
    """Why a task failed, in the coarse categories of the API contract."""

    AUTH_FAILED = "auth_failed"  #: The target or the gateway refused the credentials.
    BLOCKED = "blocked"  #: The site refused the request, as with 403.
    BAD_TARGET = "bad_target"  #: The URL cannot be fetched: no such host, page or scheme.
    RATE_LIMITED = "rate_limited"  #: The site asked for fewer requests, as with 429.
    TIMEOUT = "timeout"  #: No complete response within the deadline.
    GATEWAY_ERROR = "gateway_error"  #: The gateway or the network failed on the way.
    OTHER = "other"  #: Any other cause, such as a crash of the worker.


class RunFailure(StrEnum):
    """The account-level errors that fail a whole run."""

    #: The account at the gateway has no credits left.
    INSUFFICIENT_CREDITS = "insufficient_credits"
    #: The account at the gateway has no active plan.
    SUBSCRIPTION_INACTIVE = "subscription_inactive"
    API_KEY_CAP_REACHED = "api_key_cap_reached"  #: The API key has used all that it may use.


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """RFC 9457 problem details, stored with a failed task and returned by the API."""

    type: str  #: `urn:conveyor:problem:` followed by the code.
    title: str  #: The kind of problem, for people.
    status: int  #: An HTTP status.
    code: str  #: The word that programs branch on.
    detail: str | None = None  #: This occurrence, in Conveyor's own words.
    instance: str | None = None  #: The request id; only in API responses.


class Webhook(msgspec.Struct, frozen=True):
    url: str  #: The receiver's URL.
    signature: bool = False  #: Whether deliveries are signed.


class Result(msgspec.Struct, frozen=True, array_like=True):
    """The location of a stored body, and its size and digest to verify it."""

    key: str  #: The blob key of the body.
    size_bytes: int  #: The length of the body.
    sha256: str  #: The digest of the body.
    content_type: str  #: The content type that the site stated.
    http_status: int  #: The HTTP status of the site.
    final_url: str | None = None  #: Where redirects led to; absent without redirects.


class Attempt(msgspec.Struct, frozen=True, array_like=True):
    """One attempt at a task, as an entry of its history."""

    number: int  #: 1 for the first entry; entries that count as no attempt are numbered too.
    started_at: float  #: When the claim was taken.
    ended_at: float  #: When the outcome was reported.
    problem: Problem | None = None  #: Why it failed; absent on success.
    credits: int = 0  #: Credits charged for it.
    cost_micros: int = 0  #: Money charged for it, in millionths.


class TaskSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """One validated and normalised line of a list, before it is a task of a run.

    `sealed` has the custom headers and the request body, encrypted, because both may contain
    secrets.
    """

    index: int  #: Position in the list, from 0.
    url: str  #: The URL to fetch.
    method: Method = Method.GET  #: GET or POST.
    external_id: str | None = None  #: The caller's own name for the task.
    metadata: dict[str, str] | None = None  #: The caller's own texts.
    params: dict[str, str] | None = None  #: Scraper parameters of this line, without headers.
    sealed: str | None = None  #: Custom headers and request body, encrypted.
    problem: Problem | None = None  #: Why the line is not a valid task; absent if it is.


class StagedList(msgspec.Struct, frozen=True, tag="staged"):
    """A batch that is read from a blob of TaskSpec lines. Task ids derive from `origin_run_id`."""

    key: str  #: The blob with one TaskSpec per line.
    origin_run_id: RunId  #: The run that the task ids derive from.
    origin_batch_id: BatchId  #: The batch that the task ids derive from.


Column = int | str
"""A column of a CSV file: its position from 0, or its name in the header."""


class ListFormat(StrEnum):
    CSV = "csv"
    NDJSON = "ndjson"
    TEXT = "text"


class ListSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the bytes of a list are to be read; all but the format is about CSV."""

    format: ListFormat  #: csv, ndjson or text.
    url: Column = 0  #: The CSV column of the URL.
    external_id: Column | None = None  #: The CSV column of the external id.
    header: bool = False  #: Whether the first CSV row names the columns.
    delimiter: str = ","  #: The character between CSV cells.
    quote: str = '"'  #: The character around quoted CSV cells.


class UploadedList(msgspec.Struct, frozen=True, tag="uploaded"):
    """A batch that is read from the job's own copy of an upload, as it was at submit."""

    key: str  #: The blob with the job's own copy.
    spec: ListSpec  #: How the list is read.
    size_bytes: int  #: Its length at submit.
    sha256: str  #: Its digest at submit.
    origin_run_id: RunId  #: The run that the task ids derive from.
    origin_batch_id: BatchId  #: The batch that the task ids derive from.


class RowsOf(msgspec.Struct, frozen=True, tag="rows"):
    """A batch that replays the rows of an earlier run, or of one batch of it.

    Tasks with a status in `retry` start over, unless `reasons` or `hosts` exclude them. The other
    tasks are inherited with their results.
    """

    run_id: RunId  #: The run whose tasks are replayed.
    retry: frozenset[TaskStatus]  #: Tasks in these statuses start over; the others are inherited.
    batch_id: BatchId | None = None  #: Replay this batch only; absent for all.
    #: Of those that start over, only tasks that failed for these reasons.
    reasons: frozenset[FailureReason] | None = None
    hosts: frozenset[str] | None = None  #: Of those that start over, only tasks of these hosts.


Source = StagedList | UploadedList | RowsOf


class HostLimit(msgspec.Struct, frozen=True, omit_defaults=True):
    """Limits for one host. None means no limit."""

    concurrency: int | None = None  #: Fetches at the same time.
    rate_per_s: float | None = None  #: Fetches that may begin per second.


class HostLimits(msgspec.Struct, frozen=True, omit_defaults=True):
    """Limits for every host of a job, with exceptions for named hosts."""

    every: HostLimit  #: The limit of each host that is not named.
    hosts: dict[str, HostLimit] = {}  #: The limits of named hosts.

    def limit_for(self, host: str) -> HostLimit:
        return self.hosts.get(host, self.every)


class Job(msgspec.Struct, frozen=True):
    job_id: JobId  #: ULID of the job.
    caller: CallerId  #: The caller that owns the job.
    status: JobStatus  #: open, closed or deleted.
    created_at: float  #: When the job was submitted.
    updated_at: float  #: When the row last changed.
    format: Format = Format.HTML  #: The format of the bodies, derived from the parameters.
    params: dict[str, str] = {}  #: Scraper parameters of the job, without headers.
    headers_sealed: str | None = None  #: Custom headers, encrypted.
    auth_sealed: str | None = None  #: The caller's API key for the gateway, encrypted.
    external_id: str | None = None  #: The caller's own name for the job.
    name: str | None = None  #: A title for people.
    metadata: dict[str, str] | None = None  #: The caller's own texts.
    webhook: Webhook | None = None  #: The receiver of the job's run events.
    max_inflight: int = limits.MAX_INFLIGHT  #: Cap on parallel tasks, over all processes.
    max_attempts: int = limits.MAX_ATTEMPTS  #: Attempts that a task has.
    priority: int = 1  #: Weight among the caller's own runs.
    shard_count: int = 1  #: Number of task shards, fixed when the job is created.
    runs_count: int = 0  #: Runs that the job has ever had.
    latest_run_id: RunId | None = None  #: The newest run that is not deleted.
    active_run_id: RunId | None = None  #: The live run, if there is one.
    type: JobType = JobType.REGULAR  #: regular, scheduled or crawl.
    #: Days that results are kept after their run has ended.
    result_ttl_days: int = limits.RESULT_TTL_DAYS
    budget: BudgetCap | None = None  #: The most that each run may spend.
    host_limits: HostLimits | None = None  #: Concurrency and rate limits per host.
    task_token_sealed: str | None = None  #: Step Functions task token for the first run, encrypted.
    dedup: bool = False  #: Whether the duplicates of each list share one fetch.


class Run(msgspec.Struct, frozen=True):
    job_id: JobId  #: The job of the run.
    run_id: RunId  #: ULID of the run.
    caller: CallerId  #: The caller that owns the run.
    sequence: int  #: 1 for the first run of the job, then counting up.
    status: RunStatus  #: The stored status: running until the run ends.
    created_at: float  #: When the run was created.
    updated_at: float  #: When the row last changed; discovery selects runs by it.
    shard_count: int = 1  #: Copied from the job.
    pause_state: PauseState = PauseState.ACTIVE  #: active or paused.
    planned: int = 0  #: Lines accepted so far.
    total: int = 0  #: Tasks of sealed batches.
    open_batches: int = 0  #: Batches that are not sealed yet.
    batches_seq: int = 0  #: Lists added after the first.
    last_batch_received: bool = False  #: No further list can be added.
    #: pending or done; only for lists that are ingested after the response.
    ingest_status: IngestStatus | None = None
    stop_requested_at: float | None = None  #: When a stop or failure was recorded (its first half).
    stop_reason: str | None = None  #: Why the run was stopped.
    failure_reason: RunFailure | None = None  #: The account-level cause of a failed run.
    #: The cause in words, at most 500 characters; or why a list was not ingested.
    failure_detail: str | None = None
    rerun_of: RunId | None = None  #: The run that this one replays.
    retried: int = 0  #: Tasks that this run starts over.
    source_run_ids: tuple[RunId, ...] = ()  #: Runs whose results this run inherited.
    ended_at: float | None = None  #: When the run ended.
    #: The nominal time that created the run; absent if a caller did.
    scheduled_for: float | None = None
    expires_at: float | None = None  #: When its results expire; absent while it is live.
    #: When the sweeper has to act on expired results or rows; absent if never.
    sweep_at: float | None = None
    #: The budget that the run was started with; absent if it has none.
    budget: BudgetCap | None = None
    queue_closed: bool = False  #: The sweeper has removed the run's queue after its end.
    sampled_at: float | None = None  #: When the latest sample of its counters was taken.
    sampled_done: int = 0  #: Tasks that had ended at the latest sample.


class Batch(msgspec.Struct, frozen=True):
    """One admitted list on its way into a run: the durable intent to ingest it
    (docs/storage.md, Rows)."""

    job_id: JobId  #: The job of the batch.
    run_id: RunId  #: The run of the batch.
    batch_id: BatchId  #: Its name within the run; `0` for the first.
    status: BatchStatus  #: open, sealed or abandoned.
    total: int  #: Lines accepted; lines counted once the batch is sealed.
    created_at: float  #: When the list was admitted.
    updated_at: float  #: When the batch last progressed; stalled batches are found by it.
    #: Where the lines are read from; absent if they were inserted at once.
    source: Source | None = None
    epoch: int = 0  #: Number of the ingest attempt that may move the batch.
    done: int = 0  #: Lines that are ingested.
    #: Where the next step starts: a byte position, a task id or a line count.
    cursor: str | None = None
    failures: int = 0  #: Ingest attempts since the last progress.
    source_run_ids: tuple[RunId, ...] = ()  #: Runs whose results the batch's rows inherited.


class ShardCounters(msgspec.Struct, frozen=True):
    """The counters of one shard of a run. `status` decides which changes they accept.

    `retrying` counts tasks that wait for a retry: they have attempts and no worker.
    """

    job_id: JobId  #: The job of the counters.
    run_id: RunId  #: The run of the counters.
    shard: int  #: The shard that is counted.
    status: CounterState  #: Counter state: open, draining or closed.
    admitted: int = 0  #: Tasks of the shard.
    done: int = 0  #: Tasks that ended.
    successful: int = 0  #: Tasks that ended successfully.
    failed: int = 0  #: Tasks that failed.
    auth_failed: int = 0  #: Failed with reason auth_failed.
    blocked: int = 0  #: Failed with reason blocked.
    bad_target: int = 0  #: Failed with reason bad_target.
    rate_limited: int = 0  #: Failed with reason rate_limited.
    timeout: int = 0  #: Failed with reason timeout.
    gateway_error: int = 0  #: Failed with reason gateway_error.
    other: int = 0  #: Failed with reason other.
    credits: int = 0  #: Credits charged, all attempts included.
    cost_micros: int = 0  #: Money charged, in millionths.
    retrying: int = 0  #: Tasks between two attempts.
    stored_bytes: int = 0  #: Bytes of the bodies that the tasks stored.


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """The counters of a run: the sum of its stats rows."""

    admitted: int = 0
    done: int = 0
    successful: int = 0
    failed: int = 0
    reasons: dict[str, int] = {}
    credits: int = 0
    cost_micros: int = 0
    retrying: int = 0
    stored_bytes: int = 0


class CounterSample(msgspec.Struct, frozen=True):
    """The counters of a run at one time. The series of a run is made of the differences."""

    job_id: JobId  #: The job of the run.
    run_id: RunId  #: The run whose counters were read.
    minute: int  #: The minute that the sample closes, or the first of several in a long run.
    at: float  #: When the counters were read.
    successful: int = 0  #: Tasks that had ended successfully.
    reasons: dict[str, int] = {}  #: Tasks that had failed, by reason.
    stored_bytes: int = 0  #: Bytes of the bodies that the tasks had stored.
    credits: int = 0  #: Credits charged so far.
    cost_micros: int = 0  #: Money charged so far, in millionths.


class Task(msgspec.Struct, frozen=True):
    run_id: RunId  #: The run of the task.
    task_id: TaskId  #: A hash of the line's origin.
    shard: int  #: The shard that holds the row.
    batch_id: BatchId  #: The batch that brought the task.
    index: int  #: Position in that list.
    url: str  #: The URL to fetch.
    status: TaskStatus  #: pending, processing, successful or failed.
    created_at: float  #: When the row was written.
    updated_at: float  #: When the row last changed.
    method: Method = Method.GET  #: GET or POST.
    external_id: str | None = None  #: The caller's own name for the task.
    metadata: dict[str, str] | None = None  #: The caller's own texts.
    params: dict[str, str] | None = None  #: Scraper parameters of the task, without headers.
    sealed: str | None = None  #: Custom headers and request body, encrypted.
    claim: int = 0  #: Number of the latest claim.
    claim_until: float = 0.0  #: When that claim lapses; 0 when no worker holds it.
    attempts: int = 0  #: Attempts that reported an outcome.
    handed_back: int = 0  #: Claims that were released before an outcome.
    started_at: float | None = None  #: When the latest claim was taken.
    result: Result | None = None  #: Where the body is stored.
    problem: Problem | None = None  #: Why the task failed.
    reason: FailureReason | None = None  #: The failure reason that the task is counted under.
    #: Every attempt that reported, the latest HISTORY_MAX of them.
    history: tuple[Attempt, ...] = ()
    credits: int = 0  #: Credits charged for the task.
    cost_micros: int = 0  #: Money charged for the task, in millionths.
    source_run_id: RunId | None = None  #: The run that owns an inherited result.
    duplicate_of: TaskId | None = None  #: The task of the same list whose outcome this task gets.


class IdempotencyRecord(msgspec.Struct, frozen=True):
    """The use of an Idempotency-Key: the process that executes the request, and its response.

    `subject` is the id of the object that the request creates. It is minted with the claim, so that
    every retry creates the same object.
    """

    key_id: str  #: Hash of caller, method, path and key.
    caller: CallerId  #: The caller that sent the key.
    fingerprint: str  #: Hash of the query and the body.
    subject: str  #: The id of what the request creates.
    owner: str  #: The process start that works on the request.
    claimed_until: float  #: Until when that process works on it.
    expires_at: float  #: When the record counts as absent.
    response_status: int | None = None  #: Status of the stored response; absent until there is one.
    response_body: str | None = None  #: Body of the stored response.


class DeliveryAttempt(msgspec.Struct, frozen=True, array_like=True):
    """One delivery attempt. Of the receiver's response, only the status is stored."""

    at: float  #: When the attempt began.
    duration_s: float  #: How long it took.
    status: int | None = None  #: The receiver's HTTP status, if it answered.
    error: str | None = None  #: Why it was not a delivery.


class Notice(msgspec.Struct, frozen=True):
    """An event to deliver, written in the same transaction as the change that it reports."""

    notice_id: NoticeId  #: Hash of run and event; the event id on the wire.
    job_id: JobId  #: The job of the event.
    run_id: RunId  #: The run of the event.
    event_type: str  #: run.completed, run.stopped or run.failed.
    status: NoticeStatus  #: due, delivered, exhausted or dropped.
    occurred_at: float  #: When the run ended.
    due_at: float  #: When the next delivery is attempted; when claimed, when the claim lapses.
    payload: str  #: The bytes that every delivery attempt sends.
    attempts: int = 0  #: Delivery attempts that were recorded.
    last_error: str | None = None  #: How the latest attempt failed.
    #: Start of the delivery period: the end of the run, or the latest redelivery.
    due_since: float = 0.0
    claim: int = 0  #: Number of the latest claim or redelivery.
    tries: tuple[DeliveryAttempt, ...] = ()  #: The latest delivery attempts.
    channel: NoticeChannel = NoticeChannel.WEBHOOK  #: webhook or step_functions.


class Event(msgspec.Struct, frozen=True):
    """An event of a job, written in the same transaction as the change that it reports.

    `seq` is its position in the caller's event log, 0 until it is assigned. The event is removed
    with the job and the run whose ids it has.
    """

    caller: CallerId  #: The caller whose event log it belongs to.
    event_id: EventId  #: Hash of what happened; random for what may happen repeatedly.
    event_type: EventType  #: What happened.
    occurred_at: float  #: When it happened.
    expires_at: float  #: When the event is removed.
    data: str  #: The event's content, as JSON.
    job_id: JobId | None = None  #: The job that the event is deleted with.
    run_id: RunId | None = None  #: The run that the event is deleted with.
    seq: int = 0  #: Sequence number in the caller's event log; 0 until it is assigned.


class EventSequence(msgspec.Struct, frozen=True):
    """The number of events that a caller's log has ever had."""

    caller: CallerId  #: The caller whose event log is numbered.
    seq: int  #: The sequence number that was assigned last.


class DeletionIntent(msgspec.Struct, frozen=True):
    """The intent to remove the remaining data of a deleted job, or of one of its runs."""

    job_id: JobId  #: The deleted job, or the job of the deleted run.
    run_id: RunId | None  #: The deleted run; absent for a whole job.
    scrub_id: str  #: ULID of the intent.
    shard_count: int  #: Number of shards to delete from.
    due_at: float  #: When the next pass starts; when claimed, when the claim lapses.
    passes_left: int  #: Passes that are still to come.


class Crossing(msgspec.Struct, frozen=True):
    """The second part of a change over two stores, stored with the first part, which has decided
    it. It is removed when both parts are written."""

    job_id: JobId  #: The job of the change; it has at most one unfinished change.
    token: str  #: ULID of the change.
    made_at: float  #: When the first part was written.
    writes: str  #: The writes for the second store, as JSON.


class SigningKey(msgspec.Struct, frozen=True):
    """One HMAC key. Its secret is encrypted for its caller and `kid`."""

    kid: str  #: ULID; names the key in signatures.
    created_at: float  #: When the key was created.
    sealed: str  #: The 32 bytes of the key, encrypted.


class SigningKeys(msgspec.Struct, frozen=True):
    """The keys of a caller: the active one, and the candidate that will replace it."""

    caller: CallerId  #: The caller that owns the keys.
    active: SigningKey  #: The key that signs.
    version: int = 1  #: Raised by every change; guards the next one.
    candidate: SigningKey | None = None  #: The key that is to replace the active one.


class JobInput(msgspec.Struct, frozen=True):
    """A slot for one uploaded list. The list itself is a blob."""

    input_id: InputId  #: ULID of the file input.
    caller: CallerId  #: The caller that owns it.
    spec: ListSpec  #: How the uploaded list is read.
    created_at: float  #: When it was created.
    expires_at: float  #: When it counts as absent.


class TaskRef(msgspec.Struct, frozen=True, array_like=True):
    """The content of a queue message: enough to find the task without reading the job."""

    job_id: JobId  #: The job of the task.
    run_id: RunId  #: The run of the task, which names its queue.
    task_id: TaskId  #: The task.
    shard: int  #: The shard that holds the row.
