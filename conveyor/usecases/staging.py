"""Staging: checks the lines of a list, seals their secrets, and lays it down durably
(SPEC.md 4.1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum

import msgspec
import trio

from conveyor.domain import limits, submission
from conveyor.domain.errors import InvalidTask, InvalidTasks
from conveyor.domain.ids import BatchId, CallerId, JobId, RunId
from conveyor.domain.model import Job, StagedList, TaskSpec
from conveyor.domain.quotas import check_growth
from conveyor.domain.submission import Refusal, Secrets, TaskDraft
from conveyor.usecases.env import Env

_ENCODER = msgspec.json.Encoder()


class OnInvalid(Enum):
    """What becomes of a list with bad lines."""

    REJECT = "the list is refused as a whole"
    SKIP = "each bad line is a task that has failed already"


def place_of(caller: CallerId, job_id: JobId, field: str) -> str:
    """Where a sealed secret belongs; it opens nowhere else."""
    return f"{caller}|{job_id}|{field}"


def seal_secrets(env: Env, caller: CallerId, job_id: JobId, field: str, secrets: Secrets) -> str:
    return env.vault.seal(_ENCODER.encode(secrets), place=place_of(caller, job_id, field))


def unseal_secrets(env: Env, job: Job, field: str, sealed: str | None) -> Secrets:
    if sealed is None:
        return Secrets()
    opened = env.vault.unseal(sealed, place=place_of(job.caller, job.job_id, field))
    return msgspec.json.decode(opened, type=Secrets)


async def check_tasks(
    env: Env,
    job: Job,
    drafts: Iterable[TaskDraft],
    on_invalid: OnInvalid,
    *,
    bytes_sent: int | None = None,
) -> list[TaskSpec]:
    """All lines as specs. If any is bad: InvalidTasks, naming the first hundred, or a spec with a
    problem for each, as the caller wishes.

    GrowsTooMuch for a list that takes up far more room than the `bytes_sent` in which it came.
    A long list gives way now and then: heartbeats and other callers must not wait for its end.
    """
    specs: list[TaskSpec] = []
    invalid: list[InvalidTask] = []
    for index, draft in enumerate(drafts):
        if index % limits.CHUNK_TASKS == limits.CHUNK_TASKS - 1:
            await trio.lowlevel.checkpoint()
        try:
            specs.append(check(env, job, index, draft))
        except Refusal as refusal:
            invalid.append(submission.invalid_task(index, refusal))
            specs.append(refused(env, index, draft, refusal))
    if on_invalid is OnInvalid.REJECT:
        refuse_any(invalid, count=len(invalid), of=len(specs))
    if bytes_sent is not None:
        check_growth(bytes_sent, tasks_count=len(specs), bad_count=len(invalid))
    return specs


def refuse_any(invalid: Sequence[InvalidTask], *, count: int, of: int) -> None:
    """InvalidTasks if there are any; `count` of them, whether or not all are here."""
    if count:
        raise InvalidTasks(
            f"{count} of {of} tasks are invalid; nothing was created.",
            invalid[: limits.INVALID_TASKS_SHOWN_MAX],
        )


def judge(env: Env, job: Job, index: int, draft: TaskDraft) -> TaskSpec:
    """One line of a list whose bad lines are tasks too."""
    try:
        return check(env, job, index, draft)
    except Refusal as refusal:
        return refused(env, index, draft, refusal)


def refused(env: Env, index: int, draft: TaskDraft, refusal: Refusal) -> TaskSpec:
    """A bad line as the task that has failed already."""
    return submission.refused_task(index, draft, refusal, env.policy.targets)


def check(env: Env, job: Job, index: int, draft: TaskDraft) -> TaskSpec:
    """One good line, its secrets sealed; Refusal for a bad one."""
    spec, secrets = submission.check_task(index, draft, job.params, env.policy.targets)
    if secrets is None:
        return spec
    sealed = seal_secrets(env, job.caller, job.job_id, "task", secrets)
    return msgspec.structs.replace(spec, sealed=sealed)


def sources_prefix(job_id: JobId, run_id: RunId) -> str:
    """Where the lists of a run lie: not among bodies, which a bucket may sweep by their age."""
    return f"sources/{job_id}/{run_id}"


def source_key(job_id: JobId, run_id: RunId, batch_id: BatchId) -> str:
    return f"{sources_prefix(job_id, run_id)}/{batch_id}"


async def stage(
    env: Env, job_id: JobId, run_id: RunId, batch_id: BatchId, specs: Sequence[TaskSpec]
) -> StagedList:
    """Writes the list where ingest will read it, whole and durable."""
    key = source_key(job_id, run_id, batch_id)
    await env.blobs.put(key, list(_encoded(specs)))
    return StagedList(key=key, origin_run_id=run_id, origin_batch_id=batch_id)


def _encoded(specs: Sequence[TaskSpec]) -> Iterator[bytes]:
    for start in range(0, len(specs), limits.CHUNK_TASKS):
        yield _ENCODER.encode_lines(specs[start : start + limits.CHUNK_TASKS])
