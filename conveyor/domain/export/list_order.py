"""ListOrder: the tasks of a run in the order of its lists, in 16 bytes a task (SPEC.md 4.19).

Rows are read in the order of their ids, which are hashes. An export in list order therefore reads
the ids of all rows first, and then the rows by their ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from conveyor.domain.ids import BatchId, TaskId
from conveyor.domain.model import Task

_ID_BYTES = 16
_HASH = re.compile(rf"[0-9a-f]{{{2 * _ID_BYTES}}}\Z")
_NOTHING = bytes(_ID_BYTES)


class ListOrder:
    def __init__(self) -> None:
        self._lists: dict[BatchId, bytearray] = {}
        # Tasks without a place of their own: a damaged row has lost its position.
        self._others: list[TaskId] = []

    def add(self, task: Task) -> None:
        ids = self._lists.setdefault(task.batch_id, bytearray())
        start = _ID_BYTES * task.index
        end = start + _ID_BYTES
        if len(ids) < end:
            ids.extend(bytes(end - len(ids)))
        if ids[start:end] != _NOTHING or not _HASH.match(task.task_id):
            self._others.append(task.task_id)
        else:
            ids[start:end] = bytes.fromhex(task.task_id)

    def pages(self, limit: int) -> Iterator[list[TaskId]]:
        """Yields the ids in order: the lists in the order of their ids, then all others."""
        ids = self._ids()
        while page := list(islice(ids, limit)):
            yield page

    def _ids(self) -> Iterator[TaskId]:
        for batch_id in sorted(self._lists):
            ids = self._lists[batch_id]
            for start in range(0, len(ids), _ID_BYTES):
                if (packed := ids[start : start + _ID_BYTES]) != _NOTHING:
                    yield TaskId(packed.hex())
        yield from self._others
