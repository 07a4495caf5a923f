"""Staging: validates the lines of a list, seals their secrets, and stores the list durably
(SPEC.md 4.1).
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Iterator, Mapping, Sequence
from enum import Enum

import msgspec
import trio

from conveyor.domain import limits
from conveyor.domain.changes import BatchKey, ScheduleKey
from conveyor.domain.errors import InvalidTask, InvalidTasks
from conveyor.domain.ids import BatchId, CallerId, JobId, RunId
from conveyor.domain.model import Job, Method, StagedList, TaskSpec
from conveyor.domain.submit import admission
from conveyor.domain.submit.admission import Refusal, Secrets, TaskDraft, check_growth
from conveyor.domain.submit.scraper_params import NOT_WITH_POST
from conveyor.usecases.context import Context

_ENCODER = msgspec.json.Encoder()


class OnInvalid(Enum):
    """How a list with invalid lines is handled."""

    REJECT = "the list is refused as a whole"
    SKIP = "each bad line is a task that has failed already"


def sealing_context(caller: CallerId, job_id: JobId, field: str) -> str:
    """Returns the place to which a sealed secret belongs. It cannot be unsealed for another
    place."""
    return f"{caller}|{job_id}|{field}"


def seal_secrets(
    env: Context, caller: CallerId, job_id: JobId, field: str, secrets: Secrets
) -> str:
    return env.secret_box.seal(
        _ENCODER.encode(secrets), place=sealing_context(caller, job_id, field)
    )


def unseal_secrets(env: Context, job: Job, field: str, sealed: str | None) -> Secrets:
    if sealed is None:
        return Secrets()
    opened = env.secret_box.unseal(sealed, place=sealing_context(job.caller, job.job_id, field))
    return msgspec.json.decode(opened, type=Secrets)


async def check_tasks(
    env: Context,
    job: Job,
    drafts: Iterable[TaskDraft],
    on_invalid: OnInvalid,
    *,
    bytes_sent: int | None = None,
) -> list[TaskSpec]:
    """Returns all lines as specs. Invalid lines raise InvalidTasks with the first hundred of them,
    or become specs with a problem, as `on_invalid` states.

    Raises GrowsTooMuch for a list that needs far more storage than the `bytes_sent` of its request.
    A long list yields to the scheduler regularly: heartbeats and other requests must not wait for
    its end.
    """
    specs: list[TaskSpec] = []
    invalid: list[InvalidTask] = []
    for index, draft in enumerate(drafts):
        if index % limits.CHUNK_TASKS == limits.CHUNK_TASKS - 1:
            await trio.lowlevel.checkpoint()
        try:
            specs.append(check(env, job, index, draft))
        except Refusal as refusal:
            invalid.append(admission.invalid_task(index, refusal))
            specs.append(invalid_task(env, index, draft, refusal))
    if on_invalid is OnInvalid.REJECT:
        raise_if_invalid(invalid, count=len(invalid), of=len(specs))
    if bytes_sent is not None:
        check_growth(bytes_sent, tasks_count=len(specs), bad_count=len(invalid))
    return specs


def raise_if_invalid(invalid: Sequence[InvalidTask], *, count: int, of: int) -> None:
    """Raises InvalidTasks if `count` is not 0. `invalid` may have only the first of them."""
    if count:
        raise InvalidTasks(
            f"{count} of {of} tasks are invalid; nothing was created.",
            invalid[: limits.INVALID_TASKS_SHOWN_MAX],
        )


def validate(env: Context, job: Job, index: int, draft: TaskDraft) -> TaskSpec:
    """Validates one line of a list in which invalid lines become failed tasks."""
    try:
        return check(env, job, index, draft)
    except Refusal as refusal:
        return invalid_task(env, index, draft, refusal)


def invalid_task(env: Context, index: int, draft: TaskDraft, refusal: Refusal) -> TaskSpec:
    """Returns an invalid line as a task that has already failed."""
    return admission.refused_task(index, draft, refusal, env.config.targets)


def check(env: Context, job: Job, index: int, draft: TaskDraft) -> TaskSpec:
    """Validates one line and seals its secrets. Raises Refusal for an invalid one."""
    config = env.config
    spec, secrets = admission.check_task(index, draft, job.params, config.targets, config.gateway)
    if secrets is None:
        return spec
    sealed = seal_secrets(env, job.caller, job.job_id, "task", secrets)
    return msgspec.structs.replace(spec, sealed=sealed)


def sources_prefix(job_id: JobId, run_id: RunId) -> str:
    """Returns the prefix of the lists of a run. It differs from that of bodies, because a bucket
    may remove bodies by their age."""
    return f"sources/{job_id}/{run_id}"


def source_key(job_id: JobId, run_id: RunId, batch_id: BatchId) -> str:
    return f"{sources_prefix(job_id, run_id)}/{batch_id}"


async def stage(
    env: Context, job_id: JobId, run_id: RunId, batch_id: BatchId, specs: Sequence[TaskSpec]
) -> StagedList:
    """Stores the list where ingest will read it, whole and durable."""
    key = source_key(job_id, run_id, batch_id)
    await env.blobs.put(key, list(_encode(specs)))
    return StagedList(key=key, origin_run_id=run_id, origin_batch_id=batch_id)


def _encode(specs: Sequence[TaskSpec]) -> Iterator[bytes]:
    for start in range(0, len(specs), limits.CHUNK_TASKS):
        yield _ENCODER.encode_lines(specs[start : start + limits.CHUNK_TASKS])


# Long lists: validated and staged while they arrive, whatever their length (docs/api.md, Submitting
# lists).
#
# Each attempt stages its list under a key of its own, so that no other attempt can change it. The
# list counts only if a batch or a schedule names its key. If none does, the attempt that staged it
# removes it.


class StagedTasks(msgspec.Struct, frozen=True):
    """A staged list in which every line is validated."""

    source: StagedList
    total: int


class StreamingValidator:
    """Validates the lines of one list while they arrive. It has a single user, so it may run in an
    executor."""

    def __init__(self, env: Context, job: Job) -> None:
        self._env = env
        self._job = job
        self.count = 0
        self._invalid: list[InvalidTask] = []
        self._invalid_count = 0
        self._posts: list[int] = []
        self._posts_count = 0

    def take(self, drafts: Sequence[TaskDraft]) -> bytes:
        """Returns these lines in the format that ingest reads."""
        specs = [self._check(index, draft) for index, draft in enumerate(drafts, self.count)]
        self.count += len(drafts)
        return _ENCODER.encode_lines(specs)

    def refuse_invalid(self, on_invalid: OnInvalid, params: Mapping[str, str]) -> None:
        """Raises InvalidTasks if the list must be refused for its invalid lines.

        `params` are the parameters of the job, which may arrive after the list. A POST line that
        conflicts with them refuses the list in any case, because the line is already written as
        valid.
        """
        clash = sorted(NOT_WITH_POST & params.keys())
        clashing = self._posts if clash else []
        if on_invalid is OnInvalid.SKIP and not clashing:
            return
        refusals = [
            admission.invalid_task(index, Refusal("method_param_conflict", clash[0]))
            for index in clashing
        ]
        count = self._invalid_count + (self._posts_count if clash else 0)
        invalid_tasks = sorted([*self._invalid, *refusals], key=lambda invalid: invalid.index)
        raise_if_invalid(invalid_tasks, count=count, of=self.count)

    def refuse_growth(self, bytes_sent: int) -> None:
        """Raises GrowsTooMuch if the list needs far more storage than the bytes that were sent."""
        check_growth(bytes_sent, tasks_count=self.count, bad_count=self._invalid_count)

    def _check(self, index: int, draft: TaskDraft) -> TaskSpec:
        try:
            spec = check(self._env, self._job, index, draft)
        except Refusal as refusal:
            self._invalid_count += 1
            # Keep only those that the response shows: a list may have a million invalid lines.
            if len(self._invalid) < limits.INVALID_TASKS_SHOWN_MAX:
                self._invalid.append(admission.invalid_task(index, refusal))
            return invalid_task(self._env, index, draft, refusal)
        if spec.method is Method.POST:
            self._posts_count += 1
            # Whether a POST conflicts is known only when the job's parameters have arrived.
            if len(self._posts) < limits.INVALID_TASKS_SHOWN_MAX:
                self._posts.append(index)
        return spec


def staging_key(env: Context, job: Job, run_id: RunId, batch_id: BatchId) -> StagedList:
    """Returns a new key for the list of one attempt."""
    prefix = sources_prefix(job.job_id, run_id)
    key = f"{prefix}/{env.new_id()}/{batch_id}"
    return StagedList(key=key, origin_run_id=run_id, origin_batch_id=batch_id)


async def stage_stream(env: Context, source: StagedList, lines: AsyncIterable[bytes]) -> None:
    """Stores the list while it arrives. Errors of `lines` are raised as they are, and then nothing
    is stored."""
    await env.blobs.put_stream(source.key, lines)


async def delete_if_unreferenced(env: Context, job: Job, source: StagedList) -> None:
    """Deletes the list if no batch and no schedule names it. Call it only if no later commit can
    name it."""
    batch = await env.store.read(BatchKey(job.job_id, source.origin_run_id, source.origin_batch_id))
    schedule = await env.store.read(ScheduleKey(job.job_id))
    used = [row.source for row in (batch, schedule) if row is not None]
    if not any(
        isinstance(used_source, StagedList) and used_source.key == source.key
        for used_source in used
    ):
        await env.blobs.delete_prefix(source.key.rpartition("/")[0])
