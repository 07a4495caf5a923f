"""Group commit: callers that wait to write share one commit (docs/engines.md, Group commit).

GroupCommit collects the callers, starts a group in the next scheduler turn, bounds the groups that
run at the same time, resumes the callers of a group that has ended, and lets a cancelled caller
leave at any time. It does not know what a write is. Its users:

- TransactionCommitter (sqlite/transactions.py): operations of SQLite, in one transaction.
- PackFiles (sqlite/pack_files.py): small bodies, appended to a few files, with one fsync per file.
- FileBlobs (sqlite/blobs.py): large bodies, each a file, with one fsync per directory.
- PostgresStore (postgres/store.py): changes, in one transaction.

The shard writer (actors/shard_writer.py) groups settles too, but it is not a user: it gathers for
seconds instead of one scheduler turn, retries a group while the engine is unavailable, and must
work on every engine. Its groups arrive here as one operation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import outcome
import trio

from conveyor.ports.errors import Unavailable

T = TypeVar("T")
W = TypeVar("W")

# How long a batched write waits for a group that it can join. A longer wait delays settles and
# acks; a shorter one makes more commits.
_COMPANY_S = 0.008

# The result of a waiter until its write ran: the caller must not assume that it was written.
_UNKNOWN = outcome.Error(Unavailable("not written"))


class Waiter(Generic[W, T]):
    """One write, and the caller that waits for its result."""

    __slots__ = ("result", "task", "write")

    def __init__(self, write: W) -> None:
        self.write = write
        # None after the caller was woken or cancelled: rescheduling a task twice is a Trio error.
        self.task: trio.lowlevel.Task | None = trio.lowlevel.current_task()
        self.result: outcome.Outcome[T] = _UNKNOWN

    async def wait(self) -> T:
        result: T = await trio.lowlevel.wait_task_rescheduled(self._leave)
        return result

    def _leave(self, _: object) -> trio.lowlevel.Abort:
        """The caller was cancelled. Whether the write happens is then unknown."""
        self.task = None
        return trio.lowlevel.Abort.SUCCEEDED

    def wake(self) -> None:
        if self.task is not None:
            trio.lowlevel.reschedule(self.task, self.result)
            self.task = None


class GroupCommit(Generic[W, T]):
    """Forms groups of the callers that wait, and resumes them when their group has ended.

    `start` starts one group on the Trio thread. It, or a thread that it starts, calls `take` for
    the writes of the group, sets the result of each, and causes one call of `end` on the Trio
    thread.
    """

    def __init__(
        self, start: Callable[[], None], *, group_max: int, concurrent_groups_max: int = 1
    ) -> None:
        self._start = start
        self._group_max = group_max
        self._concurrent_groups_max = concurrent_groups_max
        self._token = trio.lowlevel.current_trio_token()
        self._urgent: deque[Waiter[W, T]] = deque()
        self._patient: deque[Waiter[W, T]] = deque()
        self._is_scheduled = False
        self._is_waiting_for_company = False
        self._running_count = 0
        self._rest = trio.lowlevel.ParkingLot()

    async def write(self, write: W) -> T:
        """Returns the result of the write when its group has ended."""
        waiter: Waiter[W, T] = Waiter(write)
        self._urgent.append(waiter)
        self._begin_soon()
        return await waiter.wait()

    async def write_batched(self, write: W) -> T:
        """Like `write`, but waits `_COMPANY_S` for another caller's group to join."""
        waiter: Waiter[W, T] = Waiter(write)
        self._patient.append(waiter)
        if not self.is_busy:
            self._begin_later()
        return await waiter.wait()

    @property
    def is_busy(self) -> bool:
        """Whether a group runs or will start in the next scheduler turn."""
        return self._is_scheduled or self._running_count > 0

    async def wait_until_at_rest(self) -> None:
        """Returns when no group runs, including groups whose callers were all cancelled."""
        while self.is_busy:
            await self._rest.park()

    @property
    def first(self) -> Waiter[W, T] | None:
        return self._urgent[0] if self._urgent else None

    def take(self) -> list[Waiter[W, T]]:
        """Removes the next group: an even share for each group that can run at the same time.

        The thread of a group may call it if only one group runs at a time: the Trio thread appends
        meanwhile, but removes nothing.
        """
        groups_count = self._concurrent_groups_max - self._running_count + 1
        share = -(-len(self._urgent) // groups_count)  # Rounded up.
        group = _take(self._urgent, min(share, self._group_max))
        return group + _take(self._patient, self._group_max)

    def take_first(self) -> Waiter[W, T]:
        return self._urgent.popleft()

    def put_back(self, waiters: Iterable[Waiter[W, T]]) -> None:
        """The waiters are the first of the next group, in this order."""
        self._urgent.extendleft(reversed([*waiters]))

    def end(self, group: Iterable[Waiter[W, T]], *, has_failed: bool = False) -> None:
        """Starts the next group and resumes the callers of this one."""
        self._running_count -= 1
        if has_failed:
            # In the next turn: groups that fail on the Trio thread, one after the other, would
            # otherwise nest their calls.
            self._begin_soon()
        else:
            # Before the callers of this group run, so that the thread is not idle meanwhile.
            self._begin()
        for waiter in group:
            waiter.wake()

    def _begin_soon(self) -> None:
        if not self._is_scheduled and self._running_count < self._concurrent_groups_max:
            self._is_scheduled = True
            # Deferred to the next scheduler turn: other tasks that write in this turn join the
            # group.
            self._token.run_sync_soon(self._begin)

    def _begin_later(self) -> None:
        if not self._is_waiting_for_company:
            self._is_waiting_for_company = True
            # A system task, because GroupCommit has no nursery and no caller may own the timer: the
            # caller that started it can be cancelled while others still wait.
            trio.lowlevel.spawn_system_task(self._wait_for_company)

    async def _wait_for_company(self) -> None:
        await trio.sleep(_COMPANY_S)
        self._is_waiting_for_company = False
        if self._patient:
            self._urgent.extend(self._patient)
            self._patient.clear()
            self._begin_soon()

    def _begin(self) -> None:
        self._is_scheduled = False
        while self._urgent and self._running_count < self._concurrent_groups_max:
            self._running_count += 1
            self._start()
        if not self.is_busy:
            self._rest.unpark_all()
            if self._patient:
                self._begin_later()


def _take(waiting: deque[Waiter[W, T]], count_max: int) -> list[Waiter[W, T]]:
    return [waiting.popleft() for _ in range(min(len(waiting), count_max))]
