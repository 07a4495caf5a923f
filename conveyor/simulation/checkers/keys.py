"""Keys: each makes one thing, and nobody waits for its answer for ever (I3, I5)."""

from __future__ import annotations

from collections.abc import Iterator

from conveyor.domain.ids import FIRST_BATCH
from conveyor.simulation.history import Call
from conveyor.simulation.watcher import Moment

_FOR_NOW = (b"idempotency_in_progress", b"still being ingested")


def every_key_gets_its_answer(moment: Moment) -> Iterator[str]:
    """I5: when all is calm, the last word under a key is not that one should come back later. A
    line that kills whoever fetches it may have cut that word off."""
    last: dict[tuple[str, str, str, bytes], Call] = {}
    for call in moment.history.calls:
        if call.key is not None and call.method == "POST":
            last[call.tenant, call.path, call.key, call.body] = call
    for call in last.values():
        if any(words in call.answer for words in _FOR_NOW):
            yield f"call {call.number} with key {call.key} is told to wait, and waits for ever"


def what_was_made_belongs_to_its_key(moment: Moment) -> Iterator[str]:
    """I3: clients here give a key with whatever they make, so all that was made is what some key
    stands for; a second thing under one key would be nobody's."""
    subjects = {record.subject for record in moment.after.records.values()}
    for job in moment.after.jobs.values():
        if job.job_id not in subjects:
            yield f"job {job.job_id} was made under no key"
    for run in moment.after.runs.values():
        if run.sequence > 1 and run.scheduled_for is None and run.run_id not in subjects:
            yield f"run {run.run_id} was made under no key"
    for batch in moment.after.batches.values():
        if batch.batch_id != FIRST_BATCH and batch.batch_id not in subjects:
            yield f"list {batch.batch_id} of run {batch.run_id} was made under no key"
