"""Checks error responses: they have the form of docs/api.md, Errors, and a 5xx has an injected
cause (I48)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from conveyor.schemas.problem_codes import PROBLEM_CODES
from conveyor.simulation.client_history import Call
from conveyor.simulation.invariant_monitor import StateChange

MEDIA_TYPE = "application/problem+json"

# The content of a failed task is answered with this status and the problem of the task.
_FAILED_TASK = 422


def every_refusal_is_a_problem(state: StateChange, call: Call) -> Iterator[str]:
    """I48: every 4xx and 5xx response is a problem document, with a code that its status allows and
    the matching type."""
    if call.status is None or call.status < 400:
        return
    answer = f"call {call.number} was answered {call.status}"
    if call.media_type != MEDIA_TYPE:
        yield f"{answer} as {call.media_type or 'no media type'}"
        return
    problem = _parsed(call.answer)
    if call.status == _FAILED_TASK and call.route.endswith("/content"):
        return  # This problem is that of the task; its codes come from the gateway.
    code = problem.get("code")
    if problem.get("status") != call.status or code not in PROBLEM_CODES.get(call.status, ()):
        yield f"{answer}, whose body says {problem.get('status')} {code}"
    if problem.get("type") != f"urn:conveyor:problem:{code}" or not problem.get("title"):
        yield f"{answer} with a problem of type {problem.get('type')}"


def no_5xx_without_an_injected_fault(state: StateChange, call: Call) -> Iterator[str]:
    """I48: no request is answered 500, unless a crash was injected while it was handled. No request
    is answered 5xx at all in a world without internal faults."""
    if call.status is None or call.status < 500 or call.answered_at is None:
        return
    history = state.history
    if call.status == 500:
        is_meant = any(call.sent_at <= at <= call.answered_at for at in history.crash_injected_at)
    else:
        is_meant = not history.is_fault_free or history.kills_count > 0
    if not is_meant:
        yield f"call {call.number} was answered {call.status}, and no fault was injected"


def _parsed(answer: bytes) -> Mapping[str, Any]:
    try:
        problem = json.loads(answer)
    except ValueError:
        return {}
    return problem if isinstance(problem, dict) else {}
