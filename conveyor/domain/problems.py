"""Problem details: the one place where their types and titles are written (docs/api.md, Errors)."""

from __future__ import annotations

from collections.abc import Collection

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


def handler_crashed() -> Problem:
    return make_problem(
        "worker_crashed",
        "The worker crashed over this task",
        500,
        "An error in the worker, not in the site, ended this attempt. Its log says more.",
    )


def row_damaged(fields: Collection[str]) -> Problem:
    return make_problem(
        "row_damaged",
        "The stored task cannot be read",
        500,
        f"Fields of its row are damaged: {', '.join(sorted(fields))}. It was not fetched.",
    )


def page_discarded(detail: str) -> Problem:
    return make_problem("page_discarded", "The page was fetched but not stored", 503, detail)


def call_deferred(detail: str) -> Problem:
    return make_problem("call_deferred", "The call was refused for now", 503, detail)
