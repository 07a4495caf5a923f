"""Duplicates of a list: found when the list is admitted or ingested (SPEC.md 4.23)."""

from __future__ import annotations

from collections.abc import Sequence

from conveyor.domain.ids import BatchId, RunId, TaskId, shard_of
from conveyor.domain.model import Job, Run, Task, TaskRef, TaskSpec
from conveyor.domain.queries import TasksAt
from conveyor.domain.submit import duplicates
from conveyor.domain.submit.admission import Identity
from conveyor.usecases.context import Context
from conveyor.usecases.submit import staging


def identities_of_list(
    env: Context, job: Job, specs: Sequence[TaskSpec], origin: tuple[RunId, BatchId]
) -> list[Identity]:
    """Returns the identities of the lines of a whole list."""
    return duplicates.identities_of(specs, _groups_of(env, job, specs), origin, {})


class DuplicateFinder:
    """Finds the duplicates of one list that is ingested in chunks, in order.

    The rows tell which originals the earlier chunks had. The previous chunk may still be on its way
    into the store, so its originals are remembered. Nothing else is kept in memory.
    """

    def __init__(self, env: Context, job: Job, run: Run, origin: tuple[RunId, BatchId]) -> None:
        self._env = env
        self._job = job
        self._run = run
        self._origin = origin
        self._previous: dict[TaskId, int] = {}

    async def identities(self, specs: Sequence[TaskSpec]) -> list[Identity] | None:
        """Returns the identities of the lines of the next chunk; None if all of them are
        fetched."""
        if not self._job.dedup:
            return None
        groups = _groups_of(self._env, self._job, specs)
        named = {duplicates.original_id(self._origin, group) for group in groups if group}
        known = {row.task_id: row.index for row in await self._find(sorted(named))}
        known |= self._previous
        identities = duplicates.identities_of(specs, groups, self._origin, known)
        self._previous = {
            line.task_id: spec.index
            for spec, line in zip(specs, identities, strict=True)
            if line.task_id in named
        }
        return identities

    async def _find(self, task_ids: Sequence[TaskId]) -> list[Task]:
        run = self._run
        refs = tuple(
            TaskRef(run.job_id, run.run_id, task_id, shard_of(task_id, run.shard_count))
            for task_id in task_ids
        )
        return await self._env.store.find(TasksAt(refs=refs)) if refs else []


def _groups_of(env: Context, job: Job, specs: Sequence[TaskSpec]) -> list[str | None]:
    """Returns what each line has in common with its duplicates, as a signature: task ids derive
    from it, and must not tell what is in a secret body. An invalid line has no duplicates."""
    return [None if spec.problem is not None else _group_of(env, job, spec) for spec in specs]


def _group_of(env: Context, job: Job, spec: TaskSpec) -> str:
    secrets = staging.unseal_secrets(env, job, "task", spec.sealed)
    return env.secret_box.sign(duplicates.request_of(spec, secrets), purpose="duplicate")
