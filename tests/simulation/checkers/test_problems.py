"""Tests the checkers of problem responses (I48)."""

from __future__ import annotations

from conveyor.simulation.checkers.problems import (
    MEDIA_TYPE,
    every_refusal_is_a_problem,
    no_5xx_without_an_injected_fault,
)
from conveyor.simulation.client_history import Call, History
from tests.simulation.checkers.state_changes import a_call, change_to

PROBLEM = {
    "type": "urn:conveyor:problem:not_found",
    "title": "Not found",
    "status": 404,
    "code": "not_found",
}


def a_refusal(status: int = 404, media_type: str = MEDIA_TYPE, **fields: object) -> Call:
    return a_call(status=status, answer={**PROBLEM, **fields}, media_type=media_type)


def refusals_of(call: Call) -> list[str]:
    return [*every_refusal_is_a_problem(change_to(), call)]


def test_a_documented_problem_is_accepted() -> None:
    assert refusals_of(a_refusal()) == []


def test_a_refusal_that_is_not_a_problem_document_is_reported() -> None:
    assert refusals_of(a_refusal(media_type="application/json"))
    assert refusals_of(a_call(status=404, answer=b"not found", media_type=MEDIA_TYPE))


def test_a_problem_with_an_undocumented_status_or_code_is_reported() -> None:
    assert refusals_of(a_refusal(status=409))
    assert refusals_of(a_refusal(code="whatever", type="urn:conveyor:problem:whatever"))
    assert refusals_of(a_refusal(type="about:blank"))


def test_the_content_of_a_failed_task_may_be_the_problem_of_its_target() -> None:
    path = "/v1/jobs/JOB/tasks/TASK/content"

    assert refusals_of(a_call(path=path, status=422, answer=PROBLEM, media_type=MEDIA_TYPE)) == []
    assert refusals_of(a_call(status=422, answer=PROBLEM, media_type=MEDIA_TYPE))


def test_a_500_is_reported_unless_a_fault_was_injected_at_that_moment() -> None:
    call = a_call(status=500, at=5.0)

    assert list(no_5xx_without_an_injected_fault(change_to(), call))
    assert list(
        no_5xx_without_an_injected_fault(change_to(history=History(crash_injected_at=[4.0])), call)
    )
    assert not list(
        no_5xx_without_an_injected_fault(change_to(history=History(crash_injected_at=[5.0])), call)
    )


def test_a_503_is_reported_in_a_world_without_faults() -> None:
    call = a_call(status=503)

    assert list(
        no_5xx_without_an_injected_fault(change_to(history=History(is_fault_free=True)), call)
    )
    assert list(no_5xx_without_an_injected_fault(change_to(), call)) == []
