"""Long lists: judged and staged while they arrive, whatever their length
(docs/api.md, Submitting lists).

A list is staged under a key of its own, so that no other try can change it, and only a batch or a
schedule that names the key makes it count. Whoever stages one takes it away again if none does.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Mapping, Sequence

import msgspec

from conveyor.domain import limits, submission
from conveyor.domain.changes import BatchKey, ScheduleKey
from conveyor.domain.errors import InvalidTask
from conveyor.domain.ids import BatchId, RunId
from conveyor.domain.model import Job, Method, StagedList, TaskSpec
from conveyor.domain.params import NOT_WITH_POST
from conveyor.domain.quotas import check_growth
from conveyor.domain.submission import Refusal, TaskDraft
from conveyor.usecases import staging
from conveyor.usecases.env import Env
from conveyor.usecases.staging import OnInvalid

_ENCODER = msgspec.json.Encoder()


class LongList(msgspec.Struct, frozen=True):
    """A list that lies staged, every line of it judged."""

    source: StagedList
    total: int


class Intake:
    """Judges the lines of one list as they come. Nobody else uses it: it may work aside."""

    def __init__(self, env: Env, job: Job) -> None:
        self._env = env
        self._job = job
        self.count = 0
        self._invalid: list[InvalidTask] = []
        self._invalid_count = 0
        self._posts: list[int] = []
        self._posts_count = 0

    def take(self, drafts: Sequence[TaskDraft]) -> bytes:
        """These lines as ingest will read them."""
        specs = [self._judged(index, draft) for index, draft in enumerate(drafts, self.count)]
        self.count += len(drafts)
        return _ENCODER.encode_lines(specs)

    def refuse_invalid(self, on_invalid: OnInvalid, params: Mapping[str, str]) -> None:
        """InvalidTasks if the list is to be refused for its bad lines.

        `params` are those of the job, which may have come behind the list. A POST that clashes with
        them refuses the list in any case: its line is written.
        """
        clash = sorted(NOT_WITH_POST & params.keys())
        clashing = self._posts if clash else []
        if on_invalid is OnInvalid.SKIP and not clashing:
            return
        refusals = [
            submission.invalid_task(index, Refusal("method_param_conflict", clash[0]))
            for index in clashing
        ]
        count = self._invalid_count + (self._posts_count if clash else 0)
        shown = sorted([*self._invalid, *refusals], key=lambda invalid: invalid.index)
        staging.refuse_any(shown, count=count, of=self.count)

    def refuse_growth(self, bytes_sent: int) -> None:
        """GrowsTooMuch if the list takes up far more room than what was sent."""
        check_growth(bytes_sent, tasks_count=self.count, bad_count=self._invalid_count)

    def _judged(self, index: int, draft: TaskDraft) -> TaskSpec:
        try:
            spec = staging.check(self._env, self._job, index, draft)
        except Refusal as refusal:
            self._invalid_count += 1
            if len(self._invalid) < limits.INVALID_TASKS_SHOWN_MAX:
                self._invalid.append(submission.invalid_task(index, refusal))
            return staging.refused(self._env, index, draft, refusal)
        if spec.method is Method.POST:
            self._posts_count += 1
            if len(self._posts) < limits.INVALID_TASKS_SHOWN_MAX:
                self._posts.append(index)
        return spec


def place(env: Env, job: Job, run_id: RunId, batch_id: BatchId) -> StagedList:
    """Where one try lays down its list."""
    prefix = staging.sources_prefix(job.job_id, run_id)
    key = f"{prefix}/{env.mint()}/{batch_id}"
    return StagedList(key=key, origin_run_id=run_id, origin_batch_id=batch_id)


async def stage(env: Env, source: StagedList, lines: AsyncIterable[bytes]) -> None:
    """Writes the list as it comes; whatever `lines` raises comes through, and nothing is left."""
    await env.blobs.put_stream(source.key, lines)


async def drop_unless_used(env: Env, job: Job, source: StagedList) -> None:
    """Takes the list away if nothing came of it. Only for when that is certain."""
    batch = await env.store.read(BatchKey(job.job_id, source.origin_run_id, source.origin_batch_id))
    schedule = await env.store.read(ScheduleKey(job.job_id))
    used = [row.source for row in (batch, schedule) if row is not None]
    if not any(isinstance(each, StagedList) and each.key == source.key for each in used):
        await env.blobs.delete_prefix(source.key.rpartition("/")[0])
