"""Problem details: the one place where their types and titles are written (SPEC 4.3)."""

from __future__ import annotations

from conveyor.domain.errors import InvalidTask
from conveyor.domain.model import Problem


def problem_type(code: str) -> str:
    return f"urn:conveyor:problem:{code}"


def make_problem(code: str, title: str, status: int, detail: str | None = None) -> Problem:
    return Problem(type=problem_type(code), title=title, status=status, code=code, detail=detail)


def worker_lost(claims: int) -> Problem:
    return make_problem(
        "worker_crashed",
        "The worker was lost",
        500,
        f"The task was started {claims} times and its worker was lost each time.",
    )


def invalid_line(invalid: InvalidTask) -> Problem:
    return make_problem(invalid.reason, "The line is not a valid task", 400, invalid.value)
