"""Problem details: the one place where their types and titles are written (SPEC 4.3)."""

from __future__ import annotations

from conveyor.domain.model import Problem


def problem_type(code: str) -> str:
    return f"urn:conveyor:problem:{code}"


def make_problem(code: str, title: str, status: int, detail: str | None = None) -> Problem:
    return Problem(type=problem_type(code), title=title, status=status, code=code, detail=detail)


def worker_lost(times: int) -> Problem:
    return make_problem(
        "worker_crashed",
        "The worker was lost",
        500,
        f"The worker of this task was lost {times} times before it could report.",
    )
