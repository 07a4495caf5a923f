"""Markers: each page names the request that it answers, which is its own task's (I55)."""

from __future__ import annotations

from collections.abc import Iterator

from conveyor.domain.changes import TaskKey
from conveyor.domain.model import Task, TaskStatus
from conveyor.simulation.watcher import Moment

HOSTILE_PATH = "/hostile/"
REDIRECTED_TO = "https://elsewhere.example/again"


def every_body_answers_its_own_request(moment: Moment) -> Iterator[str]:
    """I55: the body of a success is the response to that task's request, under that claim."""
    for change in moment.changed(TaskKey):
        task: Task | None = change.new
        is_new = change.old is None or change.old.status is not TaskStatus.SUCCESSFUL
        if task is None or task.status is not TaskStatus.SUCCESSFUL or not is_new:
            continue
        if task.result is None or task.source_run_id is not None:
            continue
        if HOSTILE_PATH in task.url:
            continue  # Its caller sends itself the answers that others must not get.
        body = moment.body(task.result.key)
        if body:
            yield from _compare(moment, task, body)


def _compare(moment: Moment, task: Task, body: bytes) -> Iterator[str]:
    marker, _, url = body.partition(b"\n")[0].decode(errors="replace").partition(" ")
    own = f"{task.run_id}-{task.task_id}-{task.claim}"
    if HOSTILE_PATH in url and _caller_of(moment, marker) == _caller_of(moment, own):
        return  # Its caller, or one that sent the same request, did this to itself.
    if marker != own or url not in {task.url, REDIRECTED_TO}:
        yield f"task {own}: its body answers {marker} for {url}"


def _caller_of(moment: Moment, marker: str) -> str | None:
    run = moment.after.run_by_id.get(marker.partition("-")[0])
    return None if run is None else run.caller
