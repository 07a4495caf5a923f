"""Problem codes: every code that a refusal can have, by status, and when it is sent
(docs/api.md, Errors). The OpenAPI document and the simulator use this table."""

from __future__ import annotations

from collections.abc import Mapping

PROBLEM_CODES: Mapping[int, Mapping[str, str]] = {
    400: {
        "invalid_argument": (
            "A field has a value that it may not have, or lines of the list are bad."
        ),
        "malformed_request": "The bytes are not one well-formed HTTP/1.1 request.",
        "malformed_json": "The body is not JSON, or is nested too deeply.",
        "invalid_cursor": "The cursor was not issued for this list.",
        "invalid_start_url": "The start page of a crawl is no page that may be fetched.",
        "invalid_idempotency_key": (
            "The key is empty, too long, not printable ASCII, or sent twice."
        ),
        "metadata_too_large": "The job's metadata is too large.",
        "metadata_key_invalid": "A key of the job's metadata is invalid.",
        "callback_url_must_be_https": "The webhook is not a public https URL.",
        "callback_url_unresolvable": (
            "The webhook's host has no public address, or was not resolved in time; in the "
            "latter case with `Retry-After`."
        ),
        "step_functions_unavailable": "A task token was sent to an engine that cannot call back.",
        "webhook_signing_requires_active_key": (
            "A signature was requested and there is no active key."
        ),
    },
    401: {
        "unauthenticated": "The API key is missing or not accepted.",
    },
    404: {
        "not_found": "The id is unknown, belongs to another caller, or is deleted.",
        "crawl_not_found": "The crawl is unknown, belongs to another caller, or is deleted.",
        "content_not_found": "The crawl has no such page, or no output format.",
        "file_input_not_found": (
            "The file input is unknown, foreign or expired, or the token of an upload is wrong."
        ),
    },
    405: {
        "method_not_allowed": "The route has no such method; see `Allow`.",
    },
    408: {
        "request_timeout": "The head or the body did not arrive in time.",
    },
    409: {
        "conflict": (
            "The job is not a scheduled one; or the job, the event or the keys change too "
            "fast, then with `Retry-After`."
        ),
        "idempotency_key_conflict": "The key was used with another request.",
        "idempotency_in_progress": "The first request with the key is running; with `Retry-After`.",
        "job_not_open": (
            "The job or its run takes no more tasks, or the job is a scheduled one, whose "
            "list is fixed."
        ),
        "last_batch_received": "The job was closed.",
        "run_not_stoppable": "The latest run has completed or failed, or there is none.",
        "run_not_pausable": "The latest run is not live, or there is none.",
        "no_prior_run": "A rerun was requested and there is no run to replay.",
        "run_not_terminal": (
            "A rerun or an export of a live run; or another list while the first is being "
            "ingested, then with `Retry-After`."
        ),
        "run_has_no_budget": "The live run was started without a budget.",
        "budget_already_spent": "The new budget is below what is spent or reserved.",
        "run_has_descendants": "Another run needs the results or the list of this one.",
        "no_matching_tasks": "The filter of the rerun matches no task.",
        "ingest_incomplete": "A filtered rerun of a run that ended before its list was ingested.",
        "candidate_pending": "A third signing key was requested while a candidate exists.",
        "no_candidate": "There is no candidate key to finalize.",
        "task_not_ready": "The task has not ended, so it has no content.",
        "export_not_ready": "The file of the export does not exist yet.",
        "file_input_not_uploaded": "No list was uploaded to the file input.",
        "file_input_unsupported_for_job_type": "An uploaded list was sent for an open job.",
    },
    410: {
        "result_expired": "The result of the task, or of the exported run, has expired.",
    },
    411: {
        "length_required": "An upload has no Content-Length.",
    },
    413: {
        "request_too_large": "The body is too large, or would take up too much storage.",
    },
    414: {
        "uri_too_long": "The request target is too long.",
    },
    415: {
        "unsupported_media_type": "The body is not plain JSON.",
    },
    416: {
        "range_not_satisfiable": "The requested range begins behind the end of the file.",
    },
    429: {
        "too_many_crawls": "A quota on crawls is used up: open jobs, live runs or storage.",
        "quota_exceeded": "A quota is used up; `quota` names it, and `Retry-After` is set.",
    },
    431: {
        "headers_too_large": "The head of the request is too large.",
    },
    500: {
        "internal": "A bug in Conveyor; the response says nothing else about it.",
        "result_damaged": "The stored bytes differ from the fetched ones; the log names the task.",
    },
    503: {
        "storage_damaged": (
            "The store is damaged and the operator has to repair it; no `Retry-After`."
        ),
        "unavailable": "The storage did not answer; with `Retry-After`.",
        "not_ready": (
            "The process is starting, draining or has damaged storage; with `Retry-After`."
        ),
        "too_many_connections": (
            "Every connection is in use, or this address has too many; with `Retry-After`."
        ),
    },
    507: {
        "storage_full": "There is no room on the volume; nothing was created.",
    },
}
