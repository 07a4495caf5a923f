"""Which shard a task lives in; the layout is pinned on the job when it is made (SPEC 5.4)."""

from __future__ import annotations

from conveyor.domain import limits
from conveyor.domain.ids import TaskId


def shard_of(task_id: TaskId, shard_count: int) -> int:
    """FNV-1a over the id; a layout of one shard costs nothing."""
    if shard_count == 1:
        return 0
    value = 0x811C9DC5
    for byte in task_id.encode():
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value % shard_count


def pin_shard_count(*, tasks_count: int, is_open: bool, configured: int, sync_max: int) -> int:
    """Small closed jobs keep one shard and cheap reads; large or growing ones are spread."""
    assert 1 <= configured <= limits.TASK_SHARD_COUNT_MAX
    return configured if is_open or tasks_count >= sync_max else 1
