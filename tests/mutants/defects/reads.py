"""Mutants of reads: pages, cursors, exports and ownership (SPEC.md 4.19;
docs/api.md, Results)."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from conveyor.domain import queries
from conveyor.domain.changes import Change, Guard, JobKey, Update
from conveyor.domain.errors import NotFound
from conveyor.domain.export_record import Export
from conveyor.domain.ids import CallerId, JobId
from conveyor.domain.lifecycle import JOB_VISIBLE, RUN_VISIBLE
from conveyor.domain.model import Job, Run, RunStatus
from conveyor.domain.queries import Sign
from conveyor.simulation.profiles import HASTY_KEYS
from conveyor.simulation.swaps import combine, swap, swap_constant
from conveyor.usecases.context import Context
from conveyor.usecases.run.results import EVERY_TASK, ResultPage, TaskFilter
from tests.mutants.mutant import Mutant


def _make_cursor_without_scope(make_cursor: Any) -> Any:
    def mutated(position: str, *, scope: str, sign: Sign) -> str:
        return str(make_cursor(position, scope="", sign=sign))

    return mutated


def _read_cursor_without_scope(read_cursor: Any) -> Any:
    def mutated(cursor: str, *, scope: str, sign: Sign) -> str:
        return str(read_cursor(cursor, scope="", sign=sign))

    return mutated


def _skip_one_row(page: Any) -> Any:
    async def mutated(
        env: Context,
        job: Job,
        run: Run,
        *,
        status: str,
        cursor: str | None,
        limit: int,
        task_filter: TaskFilter = EVERY_TASK,
    ) -> ResultPage:
        ask = partial(page, env, job, run, status=status, cursor=cursor, task_filter=task_filter)
        result_page: ResultPage = await ask(limit=limit)
        if result_page.next_cursor is None or not task_filter.is_empty:
            return result_page
        longer = await ask(limit=limit + 1)
        scope = f"{job.caller}|{run.job_id}|{run.run_id}|{status}"
        sign = partial(env.secret_box.sign, purpose="cursor")
        further = queries.make_cursor(longer.tasks[-1].task_id, scope=scope, sign=sign)
        return msgspec.structs.replace(result_page, next_cursor=further)

    return mutated


def _load_any_job(_: Any) -> Any:
    async def mutated(env: Context, caller: CallerId, job_id: str) -> Job:
        job = await env.store.read(JobKey(JobId(job_id)))
        if job is None or job.status not in JOB_VISIBLE:
            raise NotFound("There is no such job.")
        return job

    return mutated


def _omit_epoch(_: Any) -> Any:
    def mutated(export: Export) -> str:
        return f"jobs/{export.job_id}/exports/{export.run_id}/{export.export_id}"

    return mutated


def _remove_fence(step: Any) -> Any:
    def mutated(
        export: Export, event: str, values: dict[str, Any], deltas: dict[str, int] | None = None
    ) -> Change:
        (write,) = step(export, event, values, deltas).writes
        assert isinstance(write, Update)
        guard = Guard(status_in=write.guard.status_in)
        return Change((msgspec.structs.replace(write, guard=guard),))

    return mutated


MUTANTS = (
    Mutant(
        name="cursor_for_anything",
        window=90,
        invariants=(38,),
        what="A cursor is accepted for any list.",
        apply=combine(
            swap("conveyor.domain.queries:make_cursor", _make_cursor_without_scope),
            swap("conveyor.domain.queries:read_cursor", _read_cursor_without_scope),
        ),
    ),
    Mutant(
        name="page_ends_one_too_far",
        window=89,
        invariants=(37,),
        what="The cursor of a page skips the first row after the page.",
        apply=swap("conveyor.usecases.run.results:page", _skip_one_row),
    ),
    Mutant(
        name="foreign_jobs_shown",
        window=84,
        invariants=(44,),
        what="Any caller who knows the id of a job can read its results.",
        apply=swap("conveyor.api.results:load_owned_job", _load_any_job),
    ),
    Mutant(
        name="live_run_exported",
        window=95,
        invariants=(40,),
        what="A run can be exported while its tasks are in progress.",
        apply=combine(
            swap_constant("conveyor.usecases.export:RUN_LIVE", frozenset[RunStatus]()),
            swap_constant("conveyor.domain.export.progress:RUN_ENDED", RUN_VISIBLE),
        ),
    ),
    Mutant(
        name="exports_share_a_place",
        window=94,
        invariants=(40,),
        what="A worker that loses an export to another removes the other's file.",
        apply=swap("conveyor.usecases.export:_own_prefix", _omit_epoch),
        world={
            "client_profile": "collecting",
            "client_speed": 10.0,
            "workers_count": 3,
            "limits": HASTY_KEYS,
            "rates": {"call_slow": 0.1},
        },
    ),
    Mutant(
        name="export_unfenced",
        window=94,
        invariants=(40,),
        what="A worker that has lost an export to another continues it.",
        apply=swap("conveyor.domain.export.progress:_step", _remove_fence),
        world={
            "client_profile": "collecting",
            "client_speed": 10.0,
            "workers_count": 3,
            "is_fault_free": True,
        },
    ),
)
