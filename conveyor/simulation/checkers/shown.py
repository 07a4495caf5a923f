"""What is shown of a run agrees with itself (I28)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from conveyor.simulation.history import Call
from conveyor.simulation.watcher import Moment


def a_run_at_work_is_not_idle(moment: Moment, call: Call) -> Iterator[str]:
    """I28: no run shows itself idle while its list is being ingested."""
    is_content = call.route.endswith("/content")  # Somebody's data, whatever it looks like.
    if not call.is_accepted or is_content or not call.answer.startswith(b"{"):
        return
    for run in _runs_in(call.json):
        if run["status"] == "pending" and run.get("ingest_status") == "pending":
            yield f"call {call.number} was shown run {run['run_id']} idle, with a list to come"


def _runs_in(answer: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Runs as such, those of a list, and the latest of a job or of a list of jobs."""
    for job in (answer, *answer.get("jobs", ())):
        latest = job.get("latest_run")
        if latest is not None:
            yield latest
    yield from answer.get("runs", ())
    if "run_id" in answer and "ingest_status" in answer:
        yield answer
