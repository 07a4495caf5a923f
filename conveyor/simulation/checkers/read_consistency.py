"""Checks that responses about jobs and runs agree with the rows and with each other (I22, I28, I37
to I39)."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl

from conveyor.domain import limits
from conveyor.domain.lifecycle import RUN_LIVE
from conveyor.simulation.client_history import Call
from conveyor.simulation.invariant_monitor import StateChange

NOT_FOUND = 404

_COUNTS = ("completed", "successful", "failed")
_ENDS = frozenset(("completed", "stopped", "failed"))


def a_run_with_open_lists_is_not_pending(state: StateChange, call: Call) -> Iterator[str]:
    """I28: no run is shown as pending while its list is being ingested."""
    # The content of a task is data of its site, whatever it looks like.
    is_content = call.route.endswith("/content")
    if not call.is_accepted or is_content or not call.answer.startswith(b"{"):
        return
    for run in _runs_in(call.json):
        if run["status"] == "pending" and run.get("ingest_status") == "pending":
            yield f"call {call.number} was shown run {run['run_id']} pending, with an open list"


def what_was_accepted_is_found(state: StateChange, call: Call) -> Iterator[str]:
    """I39: once a job is accepted, its caller finds it until somebody deletes it."""
    if call.method != "GET" or call.status != NOT_FOUND:
        return
    for accepted in state.history.accepted_requests.values():
        own = f"/v1/jobs/{accepted.job_id}"
        if accepted.tenant != call.tenant or call.route not in {own, f"{own}/runs"}:
            continue
        if not any(
            other_call.method == "DELETE" and other_call.path == own
            for other_call in state.history.calls
        ):
            yield f"call {call.number} did not find job {accepted.job_id}"


def an_end_that_was_shown_stays(state: StateChange) -> Iterator[str]:
    """I39: once a caller was shown or told the end of a run, every later response shows the same
    end."""
    responses = [response for call in state.history.calls for response in _shown_by(call)]
    ends: dict[str, tuple[float, str]] = {}
    for at, run in [*responses, *_delivered_ends(state)]:
        known = ends.get(run["run_id"])
        if run["status"] in _ENDS and (known is None or at < known[0]):
            ends[run["run_id"]] = at, run["status"]
    for call in state.history.calls:
        for _, run in _shown_by(call):
            at, status = ends.get(run["run_id"], (call.sent_at, ""))
            if call.sent_at > at and run["status"] != status:
                earlier = f"which was {status} at {at:.3f}"
                yield f"call {call.number} was shown {run['status']} run {run['run_id']}, {earlier}"


def counts_that_were_shown_never_fall(state: StateChange) -> Iterator[str]:
    """I22: a response shows no smaller counts than one that was sent a second or more before the
    request."""
    calls: dict[tuple[str, str], list[tuple[float, int, Call]]] = defaultdict(list)
    for call in state.history.calls:
        for at, run in _shown_by(call):
            for name in _COUNTS:
                calls[run["run_id"], name].append((at, run["stats"][name], call))
    for (run_id, name), responses in calls.items():
        responses.sort(key=lambda response: response[0])
        times, most = [response[0] for response in responses], [0]
        for _, count, _ in responses:
            most.append(max(most[-1], count))
        for _, count, call in responses:
            before = most[bisect_left(times, call.sent_at - limits.CACHED_COUNTERS_TTL_S)]
            if count < before:
                yield f"call {call.number} was shown {count} {name} of run {run_id}, after {before}"


def _shown_by(call: Call) -> Iterator[tuple[float, Mapping[str, Any]]]:
    """The runs that a response shows, and when. Only reads count: a repeated request returns the
    counts of its first answer."""
    is_read = call.method == "GET" and call.is_accepted and call.answer.startswith(b"{")
    if is_read and call.answered_at is not None and not call.route.endswith("/content"):
        for run in _runs_in(call.json):
            yield call.answered_at, run


def _delivered_ends(state: StateChange) -> Iterator[tuple[float, Mapping[str, Any]]]:
    for delivery in state.history.deliveries:
        event = json.loads(delivery.body)
        status = event["event_type"].removeprefix("run.")
        yield delivery.at, {"run_id": event["run_id"], "status": status}


def _runs_in(answer: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The runs in a response: a single run, the runs of a list, and the latest run of each job."""
    for job in (answer, *answer.get("jobs", ())):
        latest = job.get("latest_run")
        if latest is not None:
            yield latest
    yield from answer.get("runs", ())
    if "run_id" in answer and "ingest_status" in answer:
        yield answer


# Cursors: each is valid only for the list that returned it (I38).


_RUN = re.compile(r"/runs/[^/]+(?=/results$)")


def a_cursor_fits_its_own_list(state: StateChange, call: Call) -> Iterator[str]:
    """I38: a cursor is refused with any other tenant, job, run or filter."""
    query = _query(call)
    cursor = query.pop("cursor", None)
    if cursor is None or not call.is_accepted:
        return
    for other in reversed(state.history.calls):
        if other.method != "GET" or f'"{cursor}"'.encode() not in other.answer:
            continue
        other_query = _query(other)
        other_query.pop("cursor", None)
        if (other.tenant, _list(other), other_query) != (call.tenant, _list(call), query):
            yield f"call {call.number} used the cursor of call {other.number}"
        return


def _list(call: Call) -> str:
    """The list that a call pages through. The results of a job are those of its latest run, so the
    run is left out."""
    return _RUN.sub("", call.route)


def _query(call: Call) -> dict[str, str]:
    """Returns the filter of a request without its page size. No filter means the same as `all`."""
    parameters = dict(parse_qsl(call.path.partition("?")[2]))
    return {name: text for name, text in parameters.items() if name != "limit" and text != "all"}


# Pages (I37).


def pages_show_each_task_once(state: StateChange) -> Iterator[str]:
    """I37: the pages of an ended run together show each of its tasks once, in the order of ids."""
    for run_id, task_ids in state.history.paged_runs:
        run = state.after.run_by_id.get(run_id)
        if run is None or run.status in RUN_LIVE:
            continue
        ids = sorted(task.task_id for task in state.after.tasks_by_run.get(run_id, []))
        if task_ids != ids:
            yield f"run {run_id} has {len(ids)} tasks, its pages showed {len(task_ids)}"
