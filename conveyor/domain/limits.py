"""Every limit, once. The table in docs/api.md, Limits, is made of the `#:` comments."""

from __future__ import annotations

URL_CHARS_MAX = 2048  #: Characters of a URL.
EXTERNAL_ID_CHARS_MAX = 128  #: Characters of an `external_id`.
NAME_CHARS_MAX = 100  #: Characters of a job's name.
METADATA_KEYS_MAX = 20  #: Entries in metadata.
METADATA_KEY_CHARS_MAX = 128  #: Characters of a metadata key.
METADATA_VALUE_CHARS_MAX = 1024  #: Characters of a metadata value.
CUSTOM_HEADERS_MAX = 32  #: Custom headers.
CUSTOM_HEADERS_BYTES_MAX = 8192  #: Bytes of custom headers, as JSON.
PARAM_VALUE_CHARS_MAX = 16384  #: Characters of a parameter's value.
STATUS_CODES_MAX = 50  #: Statuses in `allowed_status_codes`.
SELECTORS_MAX = 100  #: Selectors in `css_extractor`.
MUST_MATCH_CHARS_MAX = 1000  #: Characters of the pattern in `must_match`.
MATCHED_CHARS_MAX = 1_000_000  #: Characters of a page, from its start, that `must_match` searches.
TASK_BODY_BYTES_MAX = 16384  #: Bytes of a task's request body.
TASK_BYTES_MAX = 26 * 1024  #: Bytes of a task: URL, metadata, parameters, headers and body.
METADATA_BYTES_MAX = 24 * 1024  #: Bytes of metadata.
PARAMS_BYTES_MAX = 24 * 1024  #: Bytes of all parameters together.
TASKS_MAX = 1_000_000  #: Lines of one list.
SYNC_TASKS_MAX = 10_000  #: Default of `CONVEYOR_SYNC_TASKS_MAX`.
INLINE_TASKS_MAX = 90  #: Lines that are inserted with the job, unless the engine takes more.
EMBEDDED_AT_ONCE_TASKS_MAX = 1_000  #: The same, on the embedded engine.
CHUNK_TASKS = 1_000  #: Lines of one ingest step.
TASK_SHARD_COUNT = 8  #: Default of `CONVEYOR_TASK_SHARD_COUNT`.
TASK_SHARD_COUNT_MAX = 64  #: Shards of a job at most.
PACK_WAIT_MS = 3_000  #: Default of `CONVEYOR_PACK_WAIT_MS`.
MAX_INFLIGHT = 100  #: Default cap on parallel tasks of a job.
MAX_INFLIGHT_MAX = 10_000  #: Parallel tasks of a job at most.
CONCURRENCY = 200  #: Default of `CONVEYOR_CONCURRENCY`.
MAX_ATTEMPTS = 3  #: Default attempts of a task.
MAX_ATTEMPTS_MAX = 10  #: Attempts of a task at most.
HISTORY_MAX = 50  #: Latest entries of a task's history that are kept.
PRIORITY_MAX = 10  #: The highest priority.
LOST_WORKERS_MAX = 10  #: Workers that a task may lose before it fails.
IDEMPOTENCY_KEY_CHARS_MAX = 128  #: Characters of an Idempotency-Key.
CURSOR_CHARS_MAX = 512  #: Characters of a cursor.
PAGE_ROWS = 100  #: Default results per page.
PAGE_ROWS_MAX = 1_000  #: Results per page at most.
ROWS_READ_MAX = 5_000  #: Rows that are read for one page.
LIST_ROWS = 50  #: Default jobs or runs per page.
LIST_ROWS_MAX = 100  #: Jobs or runs per page at most.
HOST_ROWS_MAX = 20_000  #: Rows that are read for the figures of the hosts of a run.
HOSTS_SHOWN_MAX = 200  #: Hosts of a run that are shown, those with the most failures first.
SERIES_MINUTES = 240  #: Minutes of a run with a bucket each in its series; later ones are merged.
SERIES_BUCKETS_MAX = 360  #: Buckets of a run's series in one response.
#: Tasks that must end between two samples of a run on AWS, where each sample is billed.
AWS_SAMPLE_TASKS = 100
SAMPLES_MAX = 2_000  #: Samples that are read for the series of a run.
OLDEST_FETCHES = 10  #: Fetches of a run that each worker reports, the oldest.
ORDERED_ROWS_MAX = 20_000  #: Tasks of a run whose results can be read in the order of the list.
JOBS_READ_MAX = 500  #: Jobs that are read for one page of a filtered list.
LIST_LINE_BYTES_MAX = 64 * 1024  #: Bytes of a line, or CSV record, of an uploaded list.
LIST_BYTES_MAX = 1024 * 1024 * 1024  #: Bytes of an uploaded list, decompressed.
UPLOAD_EXACT_COUNT_MAX = 100_000  #: Lines of an uploaded list up to which the count is exact.
LONG_BODY_BYTES = 512 * 1024  #: A body with a list above this size is staged while it arrives.
#: Bytes of one line of such a list, and of all other fields together.
LONG_BODY_LINE_BYTES_MAX = 1024 * 1024
UPLOAD_BYTES_MAX = 256 * 1024 * 1024  #: Bytes of an upload.
REQUEST_BYTES_MAX = 256 * 1024 * 1024  #: Bytes of a request.
JSON_DEPTH_MAX = 64  #: Nesting depth of a request.
BODY_BYTES_MAX = 25 * 1024 * 1024  #: Bytes of a fetched body, decoded.
#: Bytes of pages that a process holds while they cannot be stored.
HELD_BYTES_MAX = 256 * 1024 * 1024
BODY_MEMORY_MB_MIN = 64  #: The least that `CONVEYOR_BODY_MEMORY_MB` may be.
BODY_MEMORY_MB_MAX = 1024 * 1024  #: The most that `CONVEYOR_BODY_MEMORY_MB` may be.
INVALID_TASKS_SHOWN_MAX = 100  #: Invalid lines that a refusal names.
RERUN_HOSTS_MAX = 100  #: Hosts in the filter of a rerun.
AUDIT_BODIES_MAX = 50  #: Bodies that an audit reads.
EVENTS_KEPT_MAX = 10_000  #: Events that are kept for a caller.
EVENT_ROWS = 100  #: Default events per page.
EVENT_ROWS_MAX = 1_000  #: Events per page at most.
WEBHOOK_TRIES_KEPT = 20  #: Delivery attempts that a webhook event remembers.
TASK_TOKEN_CHARS_MAX = 2048  #: Characters of a Step Functions task token.
RATE_EVERY_MAX = 10_000  #: Units of a rate.
TIMES_OF_DAY_MAX = 288  #: Times of day of a calendar.
CRON_CHARS_MAX = 256  #: Characters of a cron expression.
SKIPS_KEPT_MAX = 10  #: Skips that a schedule remembers.
RESULT_TTL_DAYS = 14  #: Default days that results are kept.
RESULT_TTL_DAYS_MAX = 365  #: Days that results are kept at most, if `CONVEYOR_BODY_DAYS` allows it.
BODY_DAYS = 30  #: Default of `CONVEYOR_BODY_DAYS`.
ROW_DAYS = 30  #: Default of `CONVEYOR_ROW_DAYS`.
ROW_DAYS_MAX = 3_650  #: The most that `CONVEYOR_ROW_DAYS` may be.
# At a lower rate, the seconds between two fetches would not fit into the numbers of every engine.
HOST_RATE_MIN = 0.0001  #: Lowest rate of a host limit, in fetches per second.
HOST_RATE_MAX = 1_000  #: Highest rate of a host limit, in fetches per second.
HOST_OVERRIDES_MAX = 100  #: Hosts with limits of their own.
HELD_MESSAGES_MAX = 500  #: Messages that a poller holds for hosts at their limit.
BUDGET_CREDITS_MAX = 10**12  #: Credits of a budget.

# The tasks of a killed worker run again within 60 s. Its messages return after VISIBILITY_S at the
# latest. Its claims end CLAIM_TTL_S after their last renewal, which was together with that of the
# messages. A worker that receives such a message earlier bounces it until one second after the end
# of the claim. That leaves 9 s for a poll and for clocks that differ. A lease survives one missed
# heartbeat. So do a message and a claim, which are renewed when they are 20 s old
# (actors/lease_heartbeater.py). Smaller values make heartbeats more frequent and lose claims in
# short outages; larger ones delay the tasks of a killed worker.
LEASE_TTL_S = 30.0  #: Lifetime of a lease.
VISIBILITY_S = 45.0  #: Time that a received message stays hidden.
CLAIM_TTL_S = 50.0  #: Lifetime of a claim.
HEARTBEAT_S = 10.0  #: Time between heartbeats.
# The guarantees hold if the clocks of workers that share an engine differ by no more than this.
CLOCK_SKEW_S = 5.0  #: Difference between workers' clocks that is tolerated.
STATUS_TTL_S = 30.0  #: Lifetime of a run's status report.
# The runs of a killed worker are polled by others within LEASE_TTL_S: its report ends, and the
# others read the reports every PRESENCE_S and scan the runs at once.
PRESENCE_TTL_S = 20.0  #: Lifetime of a worker's report that it is alive.
PRESENCE_S = 5.0  #: Time between two such reports, and between two reads of all of them.
CACHED_COUNTERS_TTL_S = 1.0  #: Age of the counters that a GET of a live run may show.
SCRAPE_DEADLINE_S = 180.0  #: Time that one fetch has.
DRAIN_S = 90  #: Default and maximum of `CONVEYOR_DRAIN_S`.
AWS_TIMEOUT_S = 10  #: Default of `CONVEYOR_AWS_TIMEOUT_S`.
AWS_TIMEOUT_S_MAX = 60  #: The most that `CONVEYOR_AWS_TIMEOUT_S` may be.
DATABASE_CONNECTIONS = 8  #: Default of `CONVEYOR_DATABASE_CONNECTIONS`.
DATABASE_CONNECTIONS_MAX = 100  #: The most that `CONVEYOR_DATABASE_CONNECTIONS` may be.
IDEMPOTENCY_CLAIM_S = 90.0  #: Time that a request holds its key.
IDEMPOTENCY_RETRY_S = 2.0  #: Longest `Retry-After` while the first request is running.
IDEMPOTENCY_TTL_S = 24 * 3600.0  #: Time that a response is replayed.
RESULT_URL_TTL_S = 24 * 3600.0  #: Lifetime of a link to a body.
DIRECT_URL_TTL_S = 15 * 60.0  #: Longest lifetime of a storage URL.
EXPORT_TTL_S = 12 * 3600.0  #: Lifetime of an export.
EXPORT_URL_TTL_S = 3600.0  #: Lifetime of a link to an export's file.
EXPORT_CLAIM_S = 60.0  #: Time that an exporter has until it must renew its claim.
INPUT_TTL_S = 24 * 3600.0  #: Lifetime of a file input.
INPUT_GRACE_S = 2 * 3600.0  #: Time between the end of a file input and its removal.
CRAWL_PAGES = 100  #: Default pages that a crawl fetches, and that it keeps.
CRAWL_PAGES_MAX = 1_000_000  #: Pages of a crawl at most.
CRAWL_DEPTH_MAX = 100_000  #: Links between the start page of a crawl and a page at most.
CRAWL_HOSTS_MAX = 100  #: Hosts of a crawl at most.
CRAWL_SECONDS_MAX = 30 * 24 * 3600  #: Time that a crawl may be given.
CRAWL_PATTERNS_MAX = 100  #: Include patterns of a crawl at most, and exclude patterns.
CRAWL_SITEMAPS_MAX = 100  #: Sitemaps that a crawl may be given.
CRAWL_HOST_CONCURRENCY = 16  #: Default pages of one host that a crawl fetches at the same time.
CRAWLS_LISTED = 20  #: Default crawls per page of a list.
CRAWL_ROWS = 1_000  #: Default results per page of a crawl.
CRAWL_ROWS_MAX = 10_000  #: Results per page of a crawl at most.
CRAWL_CLAIM_S = 15.0  #: Time that a crawler has until it must renew its claim.
# A poller reads the host limits of a crawl this often, so a new crawl delay applies after it.
CRAWL_LIMITS_S = 5.0  #: Time after which a crawl delay applies.
BOUNCE_S_MIN = 5.0  #: Shortest delay of a bounced message.
BOUNCE_S_MAX = 300.0  #: Longest delay of a bounced message.
HOST_WAIT_S_MIN = 0.05  #: Shortest wait for a host.
HOST_SLACK_S = 0.1  #: Lateness at a host that later fetches may make up for.
WEBHOOK_TIMEOUT_S = 15.0  #: Time that one delivery attempt has.
WEBHOOK_LOOKUP_S = 1.0  #: Time to resolve a webhook's host name.
WEBHOOK_CLAIM_S = 60.0  #: Time that a notifier holds a delivery.
WEBHOOK_GIVE_UP_S = 72 * 3600.0  #: Time for which a delivery is attempted.
DELETION_CLAIM_S = 60.0  #: Time that a deletion pass has until it must show progress.
SECOND_DELETION_PASS_S = (
    SCRAPE_DEADLINE_S + CLAIM_TTL_S
)  #: Time between the first two deletion passes.
TOMBSTONE_TTL_S = (
    30 * 24 * 3600.0
)  #: Time from the second deletion pass to the last, and lifetime of a tombstone.
EVENT_TTL_S = 7 * 24 * 3600.0  #: Lifetime of an event.
EVENT_HEARTBEAT_S = 15.0  #: Longest silence of an event stream.

# `conveyor gateway`.
GATEWAY_CALLS = 64  #: Calls of one key at the same time at our own gateway.
GATEWAY_CALLS_MAX = 4096  #: The most that the setting may allow.
GATEWAY_PAGES_MAX = 256  #: The most pages that one gateway may render at the same time.
GATEWAY_BROWSER_MB = 1500  #: Megabytes of a browser above which it is replaced.
GATEWAY_BROWSER_MB_MIN = 256  #: The least that the setting may be.
GATEWAY_BROWSER_MB_MAX = 65536  #: The most that the setting may be.
