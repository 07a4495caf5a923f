"""Checks expiry: an expired result is not served, and its body is soon removed (I64, SPEC.md
4.20)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from conveyor.simulation.client_history import Call
from conveyor.simulation.invariant_monitor import StateChange

CLOCKS_APART_S = 10.0
"""The API uses its own clock, the checkers use that of the engine; without leaps they differ by
less."""
GONE_WITHIN_S = 300.0
"""How long workers may take to remove an expired body."""

_CONTENT = re.compile(r"/v1/jobs/(?P<job>[^/]+)(?:/runs/(?P<run>[^/]+))?/tasks/[^/]+/content")


def an_expired_result_is_not_served(state: StateChange, call: Call) -> Iterator[str]:
    """I64: no body is served after the results of its run have expired."""
    match = _CONTENT.fullmatch(call.route)
    if match is None or call.status != 200 or state.history.has_wrong_clocks:
        return
    job = state.after.jobs.get((match["job"],))
    run_id = match["run"] or (None if job is None else job.latest_run_id)
    run = state.after.run_by_id.get(run_id or "")
    if run is None or run.expires_at is None:
        return
    over_s = state.after.now - run.expires_at
    if over_s > CLOCKS_APART_S:
        yield f"call {call.number} was served a body of run {run.run_id}, {over_s:.0f} s expired"


def an_expired_body_is_gone(state: StateChange) -> Iterator[str]:
    """I64: while workers run, the bodies of a run are removed within minutes after its results have
    expired. This is not checked where the wall clock leaps by days: workers had no time to remove
    them."""
    if state.history.leaps_days:
        return
    for run in state.after.runs.values():
        if run.expires_at is None or run.expires_at + GONE_WITHIN_S >= state.after.now:
            continue
        for task in state.after.tasks_by_run.get(run.run_id, ()):
            is_own = task.result is not None and task.source_run_id is None
            if is_own and task.result is not None and state.body(task.result.key) is not None:
                yield f"task {run.run_id}/{task.task_id} has a body, and its result has expired"
