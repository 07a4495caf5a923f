"""Mutants of tasks in a separate store: changes that write to both stores
(docs/decisions/0037-tasks-in-a-store-of-their-own.md)."""

from __future__ import annotations

from typing import Any

import msgspec

from conveyor.domain.changes import Applied, Change, Chunk, CrossingKey, TaskKey, Verdict
from conveyor.domain.ids import JobId, RunId
from conveyor.ports.queue import send_opening
from conveyor.simulation.swaps import combine, original_of, swap
from tests.mutants.mutant import Mutant

_STORE = "conveyor.engines.two_stores:SplitStore"
_DECISIONS = "conveyor.domain.run.two_stores"


def _omit_crossing(split: Any) -> Any:
    def mutated(change: Change, *, token: str, now: float) -> Any:
        parts = split(change, token=token, now=now)
        writes = tuple(write for write in parts.first.writes if type(write.key) is not CrossingKey)
        return msgspec.structs.replace(parts, first=Change(writes))

    return mutated


def _write_second_first(_: Any) -> Any:
    async def mutated(self: Any, change: Change) -> Verdict:
        parts = original_of(f"{_DECISIONS}:split")(change, token=self._new_token(), now=self._now())
        await self._write_second(parts.crossing)
        verdict: Verdict
        (verdict,) = await self._records.commit([parts.first])
        if not isinstance(verdict, Applied):
            return verdict
        own: Verdict = await self._finish_own(change, parts, verdict)
        return own

    return mutated


def _never_rely_on_second(_: Any) -> Any:
    def mutated(row: object) -> bool:
        return False

    return mutated


def _finish_nothing(_: Any) -> Any:
    async def mutated(self: Any) -> int:
        return 0

    return mutated


def _commit_checkpoint_first(_: Any) -> Any:
    async def mutated(self: Any, chunk: Chunk) -> Any:
        refusal = await self._refusal_of_step(chunk)
        if refusal is not None and await self._finish_left(chunk.key.job_id):
            refusal = await self._refusal_of_step(chunk)
        if refusal is not None:
            return refusal
        (moved,) = await self._records.commit([Change((chunk.checkpoint,))])
        if isinstance(moved, Applied):
            await self._tasks.commit(original_of(f"{_DECISIONS}:task_inserts")(chunk))
            await send_opening(self._queue, chunk.refs)
        return moved

    return mutated


def _count_separately(inserts: Any) -> Any:
    def mutated(chunk: Chunk) -> list[Change]:
        changes = [
            Change(tuple(write for write in change.writes if isinstance(write.key, TaskKey)))
            for change in inserts(chunk)
        ]
        return [*changes, *(Change((count,)) for count in chunk.count_updates())]

    return mutated


def _delete_records_first(_: Any) -> Any:
    async def mutated(self: Any, job_id: JobId, run_id: RunId | None, limit: int) -> int:
        gone = 0
        for store in (self._records, self._tasks):
            while gone < limit:
                count = await store.delete_run_rows(job_id, run_id, limit=limit - gone)
                if count == 0:
                    break
                gone += count
        return gone

    return mutated


_MIXED = ("mixed",)
# Processes are killed between the two writes of a change more often than in a random world.
_KILLS = {"rates": {"killed_after": 0.01, "killed_before": 0.01}}
# The task store is often unavailable for a moment, and the process continues.
_REFUSALS = {"rates": {"call_refused": 0.1, "answer_lost": 0.02}}

MUTANTS = (
    Mutant(
        name="second_part_not_stored",
        window=124,
        invariants=(13, 20, 27, 41),
        what="The second part of a change is not stored with the first.",
        apply=swap(f"{_DECISIONS}:split", _omit_crossing),
        engines=_MIXED,
        world=_KILLS,
    ),
    Mutant(
        name="second_part_first",
        window=125,
        invariants=(20, 24, 41),
        what="The task store is written before the record store has decided.",
        apply=swap(f"{_STORE}._cross", _write_second_first),
        engines=_MIXED,
        world=_KILLS,
    ),
    Mutant(
        name="half_written_change_stays",
        window=126,
        invariants=(27,),
        what="Neither a reader nor a worker finishes a change that a crash left half-written.",
        apply=combine(
            swap(f"{_DECISIONS}:relies_on_second", _never_rely_on_second),
            swap(f"{_STORE}.finish_unfinished", _finish_nothing),
        ),
        engines=_MIXED,
        world=_REFUSALS,
    ),
    Mutant(
        name="checkpoint_before_rows",
        window=127,
        invariants=(2, 8, 13),
        what="A step of an ingest moves the checkpoint before it writes the tasks.",
        apply=swap(f"{_STORE}.put_chunk", _commit_checkpoint_first),
        engines=_MIXED,
        world=_KILLS,
    ),
    Mutant(
        name="step_counted_apart",
        window=128,
        invariants=(21, 22),
        what="The tasks of a step are counted in another commit than their inserts.",
        apply=swap(f"{_DECISIONS}:task_inserts", _count_separately),
        engines=_MIXED,
        world=_KILLS,
    ),
    Mutant(
        name="run_deleted_before_its_tasks",
        window=129,
        invariants=(33,),
        what="A deletion removes the row of a run before its tasks.",
        apply=swap(f"{_STORE}._delete_rows", _delete_records_first),
        engines=_MIXED,
        world=_KILLS,
    ),
)
