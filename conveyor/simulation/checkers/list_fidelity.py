"""Checks lines: each accepted list is stored line by line, as it was sent (I2, I10, I12, I68)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conveyor.domain.changes import TaskKey
from conveyor.domain.lifecycle import TASK_TERMINAL
from conveyor.domain.model import RunStatus, Task, TaskStatus
from conveyor.domain.submit.url_normalization import normalize_url
from conveyor.simulation.client_history import Call, Fetch, History
from conveyor.simulation.invariant_monitor import StateChange

Line = Mapping[str, Any]
Lines = Sequence[Line]

_SUBMIT = "/v1/jobs"
_METHODS = (None, "GET", "POST")


@dataclass(slots=True)
class Lists:
    """What clients sent for one job. `accepted` lists were answered with success; any of `sent` may
    be stored. An uploaded list is one of several texts, because its owner may have replaced it."""

    accepted: list[Lines] = field(default_factory=list)
    sent: list[Lines] = field(default_factory=list)
    uploads: list[Lines] = field(default_factory=list)


def every_line_is_its_task(state: StateChange) -> Iterator[str]:
    """I2, I10: a completed run has each accepted list, line by line, and no list that no client
    sent. An uploaded list is stored as it was at one instant."""
    for job_id, lists in _lists_by_job(state.history).items():
        for run in state.after.runs_by_job.get(job_id, []):
            if run.status is RunStatus.COMPLETED and not state.is_deleted(run):
                tasks = state.after.tasks_by_run.get(run.run_id, [])
                yield from _compare(run.run_id, _by_batch(tasks), lists)


def _compare(run_id: str, batches: Mapping[str, list[Task]], lists: Lists) -> Iterator[str]:
    known = [*lists.sent, *lists.uploads]
    for batch_id, tasks in batches.items():
        if not any(_is_list(tasks, lines) for lines in known):
            yield f"list {batch_id} of run {run_id} is not a list that a client sent"
    for lines in lists.accepted:
        if lines and not any(_is_list(tasks, lines) for tasks in batches.values()):
            yield f"run {run_id} lacks a list of {len(lines)} lines that was accepted"


def a_bad_line_is_a_failed_task(state: StateChange) -> Iterator[str]:
    """I12: an invalid line of an accepted list is a failed task with a reason, and was never
    fetched; a valid line is never refused."""
    for job_id, lists in _lists_by_job(state.history).items():
        for run in state.after.runs_by_job.get(job_id, []):
            if run.status is RunStatus.COMPLETED and not state.is_deleted(run):
                tasks = state.after.tasks_by_run.get(run.run_id, [])
                for batch in _by_batch(tasks).values():
                    yield from _misjudged(batch, lists)


def _misjudged(tasks: list[Task], lists: Lists) -> Iterator[str]:
    lines = next((lines for lines in lists.sent if _is_list(tasks, lines)), ())
    for task, line in zip(tasks, lines, strict=False):
        is_refused = task.status is TaskStatus.FAILED and not task.claim
        if _is_bad(line) != (is_refused and task.problem is not None):
            yield f"task {task.run_id}/{task.task_id} was validated wrongly: it is {task.status}"


def _lists_by_job(history: History) -> dict[str, Lists]:
    """The lists of each job that a client knows. A list that is sent again is the same list."""
    lists_by_job: dict[str, Lists] = {}
    for call in history.calls:
        if not _is_submit(call):
            continue
        body, job_id = json.loads(call.body), call.json["job_id"]
        if job_id in lists_by_job:
            continue
        lists = lists_by_job[job_id] = Lists()
        if "file_input_id" in body:
            lists.uploads += _uploaded(history, body["file_input_id"])
        else:
            lists.accepted.append(body["tasks"])
            lists.sent.append(body["tasks"])
    keys: set[tuple[str, str | None]] = set()
    for call in history.calls:
        job_id = call.route.removeprefix(f"{_SUBMIT}/").removesuffix("/tasks")
        is_list = call.method == "POST" and call.route.endswith("/tasks")
        if not is_list or job_id not in lists_by_job:
            continue
        lines = json.loads(call.body)["tasks"]
        lists_by_job[job_id].sent.append(lines)
        if call.is_accepted and (call.path, call.key) not in keys:
            keys.add((call.path, call.key))
            lists_by_job[job_id].accepted.append(lines)
    return lists_by_job


def _is_submit(call: Call) -> bool:
    is_one = call.method == "POST" and call.route == _SUBMIT and call.is_accepted
    return is_one and "job_id" in call.json


def _uploaded(history: History, input_id: str) -> Iterator[Lines]:
    texts = [text for place, text in history.uploads if input_id in place]
    texts += [call.body for call in history.calls if call.method == "PUT" and input_id in call.path]
    return ([{"url": url} for url in text.decode().splitlines()] for text in texts)


def _by_batch(tasks: Sequence[Task]) -> dict[str, list[Task]]:
    batches: dict[str, list[Task]] = {}
    for task in sorted(tasks, key=lambda task: task.index):
        batches.setdefault(task.batch_id, []).append(task)
    return batches


def _is_list(tasks: Sequence[Task], lines: Lines) -> bool:
    return len(tasks) == len(lines) and all(
        task.index == index and _is_line(task, line)
        for index, (task, line) in enumerate(zip(tasks, lines, strict=True))
    )


def _is_line(task: Task, line: Line) -> bool:
    """Whether the task is this line. Of an invalid line only a shortened text is stored, so it is
    not compared."""
    return _is_bad(line) or task.url == line["url"]


def _is_bad(line: Line) -> bool:
    is_web = str(line["url"]).startswith(("http://", "https://"))
    return not is_web or line.get("method") not in _METHODS


# Duplicates: each repeats an earlier line of its list, shares its fetch and ends like it (I68).

# A duplicate may fail by itself with these codes: its handler, its worker or its row was the cause.
_OF_ITS_OWN = frozenset({"worker_crashed", "worker_lost", "row_damaged"})


def a_duplicate_is_not_fetched(state: StateChange, fetch: Fetch) -> Iterator[str]:
    """I68: of equal lines only the first one, the original, is fetched."""
    task = state.after.tasks.get((fetch.run_id, fetch.task_id))
    if task is not None and task.duplicate_of is not None:
        yield f"task {_name_of(task)} is fetched, a duplicate of {task.duplicate_of}"


def a_duplicate_ends_as_its_original(state: StateChange) -> Iterator[str]:
    """I68: a duplicate ends after its original, with the same body or the same failure."""
    for change in state.changed(TaskKey):
        task: Task | None = change.new
        is_new = change.old is None or change.old.status not in TASK_TERMINAL
        if task is None or task.duplicate_of is None or task.status not in TASK_TERMINAL:
            continue
        is_own = task.problem is not None and task.problem.code in _OF_ITS_OWN
        original = state.after.tasks.get((task.run_id, task.duplicate_of))
        if not is_new or is_own or change.old is None:
            # A rerun that inherits rows writes them in the order of their ids, not originals first.
            continue
        if original is None or original.status not in TASK_TERMINAL:
            yield f"task {_name_of(task)} ended before its original"
        elif (task.result, task.problem) != (original.result, original.problem):
            yield f"task {_name_of(task)} did not end as its original"


def duplicates_are_those_of_their_list(state: StateChange) -> Iterator[str]:
    """I68: in a completed run of a job with `dedup`, each line whose URL an earlier line of its
    list already asked for is a duplicate of the first such line, and no other line is a
    duplicate."""
    for run in state.after.runs.values():
        job = state.after.jobs.get((run.job_id,))
        if run.status is not RunStatus.COMPLETED or job is None or state.is_deleted(run):
            continue
        first_of: dict[tuple[str, str, bool], str] = {}
        tasks = state.after.tasks_by_run.get(run.run_id, [])
        for task in sorted(tasks, key=lambda task: (task.batch_id, task.index)):
            url = normalize_url(task.url)
            if not job.dedup or url is None or not task.claim:
                if task.duplicate_of is not None and not job.dedup:
                    yield f"task {_name_of(task)} is a duplicate in a job without dedup"
                continue
            # Within a list, clients give all lines with secrets the same ones.
            line = (task.batch_id, url, task.sealed is not None)
            first = first_of.setdefault(line, task.task_id)
            if task.duplicate_of != (None if first == task.task_id else first):
                yield f"task {_name_of(task)} is a duplicate of {task.duplicate_of}, not of {first}"


def _name_of(task: Task) -> str:
    return f"{task.run_id}/{task.task_id}"
