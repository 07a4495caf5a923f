"""Group commit: all callers that wait to write share one SQLite transaction
(docs/engines.md, Group commit).

The problem: `synchronous = FULL` makes every COMMIT an fsync, and an fsync costs more than all the
statements of a write. A COMMIT costs the same for one operation as for fifty. So one connection
writes, and the committer collects the operations of all waiting callers into one transaction.

The operations of a group run on the Trio thread, one after the other. Only the COMMIT, which is the
fsync, runs in the writer thread. A group needs one hop to that thread and one hop back, and an
operation needs none.

The alternative is to run the statements in the writer thread too. Then every statement releases
the GIL and must acquire it again. The table shows tasks that were claimed and settled per second,
with 64 and 200 concurrent tasks, while the Trio thread was always busy:

    statements run in     GIL switch interval     64 tasks     200 tasks
    the thread            5 ms                       0-600       0-1,000
    the thread            0.05 ms                    1,000         2,200
    Trio, COMMIT not      5 ms                      20-470     450-2,600
    Trio, COMMIT not      0.1 ms                     2,150         5,500

A thread that waits for the GIL restarts its 5 ms whenever Trio polls its sockets, so it may starve
for seconds. This is why database.py sets a short switch interval.

Two kinds of write make groups larger. A batched write (settle, ack) waits a few milliseconds for a
transaction to join. An early write (receive) returns before its transaction is durable, so that
the claims that follow it join the same transaction. Together they need 370 commits for 10,000
pages, where one commit per step needed 960.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import outcome
import trio

from conveyor.engines.executor import DiskExecutor, ThreadExecutor
from conveyor.engines.sqlite.errors import is_busy, raise_translated
from conveyor.ports.errors import Unavailable

T = TypeVar("T")
Op = Callable[[sqlite3.Connection], T]

# Limits a group to about 10 ms of the Trio thread. A larger value delays every other task of the
# process; a smaller one needs more commits. One ingest step of 1,000 rows takes as long by itself
# (measured: 9 to 12 ms).
_GROUP_OPS_MAX = 256
# How long a batched write waits for a transaction that it can join. A longer wait delays settles
# and acks; a shorter one makes more commits.
_COMPANY_S = 0.008

# The result of a waiter until its operation ran: the caller must not assume that it was written.
_UNKNOWN = outcome.Error(Unavailable("not written"))


class _Waiter:
    __slots__ = ("is_early", "op", "result", "task")

    def __init__(self, op: Op[Any], *, is_early: bool = False) -> None:
        self.op = op
        self.is_early = is_early
        # None after the caller was woken or cancelled: rescheduling a task twice is a Trio error.
        self.task: trio.lowlevel.Task | None = trio.lowlevel.current_task()
        self.result: outcome.Outcome[Any] = _UNKNOWN

    async def answer(self) -> Any:
        try:
            return await trio.lowlevel.wait_task_rescheduled(self.leave)
        except sqlite3.Error as error:
            raise_translated(error)

    def leave(self, _: object) -> trio.lowlevel.Abort:
        """The caller was cancelled. Whether the write happens is then unknown."""
        self.task = None
        return trio.lowlevel.Abort.SUCCEEDED

    def wake(self) -> None:
        if self.task is not None:
            trio.lowlevel.reschedule(self.task, self.result)
            self.task = None


class GroupCommitter:
    """Owns the only writing connection. `_group` is the group that uses it, or None.

    An operation must be a function of the connection alone. If one operation of a group fails, the
    committer rolls the group back and runs each operation again in a transaction of its own, so
    that only the failing operation reports an error.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        executor: DiskExecutor | None = None,
        *,
        on_error: Callable[[BaseException], bool] = lambda _: False,
        on_commit: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_error` receives the error of a failed group and returns whether to retry it."""
        self._connection = connection
        self._on_error = on_error
        self._on_commit = on_commit
        self._executor = executor or ThreadExecutor()
        self._token = trio.lowlevel.current_trio_token()
        self._waiting: deque[_Waiter] = deque()
        self._patient: deque[_Waiter] = deque()
        self._is_waiting_for_company = False
        # Members of failed groups, each to be run in a transaction of its own.
        self._alone: deque[_Waiter] = deque()
        self._group: list[_Waiter] | None = None
        self._changes_before = 0
        self.commit_count = 0

    async def write(self, op: Op[T]) -> T:
        """Runs `op` in a transaction. Returns once that transaction is durable."""
        result: T = await self._urgent(_Waiter(op))
        return result

    async def write_batched(self, op: Op[T]) -> T:
        """Like `write`, but waits `_COMPANY_S` for another caller's transaction to join."""
        waiter = _Waiter(op)
        self._patient.append(waiter)
        if self._group is None:
            self._begin_later()
        result: T = await waiter.answer()
        return result

    async def write_early(self, op: Op[T]) -> T:
        """Returns as soon as `op` has run. The caller's next write joins the same transaction.

        Use it only for writes that may be lost: if the transaction fails, the caller is not
        informed.
        """
        result: T = await self._urgent(_Waiter(op, is_early=True))
        return result

    async def _urgent(self, waiter: _Waiter) -> Any:
        self._waiting.append(waiter)
        self._begin_soon()
        return await waiter.answer()

    def _begin_soon(self) -> None:
        if self._group is None:
            self._group = []
            # Deferred to the next scheduler turn: other tasks that write in this turn join the
            # group.
            self._token.run_sync_soon(self._begin)

    def _begin_later(self) -> None:
        if not self._is_waiting_for_company:
            self._is_waiting_for_company = True
            # A system task, because the committer has no nursery and no caller may own the timer:
            # the caller that started it can be cancelled while others still wait.
            trio.lowlevel.spawn_system_task(self._wait_for_company)

    async def _wait_for_company(self) -> None:
        await trio.sleep(_COMPANY_S)
        self._is_waiting_for_company = False
        if self._patient:
            self._begin_soon()

    def _begin(self) -> None:
        group = self._gather()
        self._group = group or None
        if not group:
            return
        beginning = outcome.capture(self._begin_immediate)
        if isinstance(beginning, outcome.Error) and is_busy(beginning.error):
            # Another process holds the write lock. The writer thread waits for it, because the
            # Trio thread must not block.
            start = partial(self._executor.start_when_unlocked, is_locked=is_busy)
            self._start(start, self._begin_immediate, self._begun)
        else:
            self._begun(beginning)

    def _gather(self) -> list[_Waiter]:
        """Returns the next group, early writes first.

        An early write returns its result before the commit. It must therefore see committed rows
        only, and it does, because no other operation of the group has run yet.
        """
        if self._alone:
            return [self._alone.popleft()]
        group = [*_take(self._waiting), *_take(self._patient)]
        return sorted(group, key=lambda waiter: not waiter.is_early)

    def _begun(self, beginning: outcome.Outcome[Any]) -> None:
        if isinstance(beginning, outcome.Error):
            self._end(beginning)
            return
        self._changes_before = self._connection.total_changes
        group = self._in_group()
        if not self._run(group):
            return
        early = [waiter for waiter in group if waiter.is_early]
        for waiter in early:
            waiter.wake()
        if early:
            # The woken callers run in the next scheduler turn. Their writes are queued by the turn
            # after that, so the transaction stays open for two turns.
            self._token.run_sync_soon(self._token.run_sync_soon, self._add_late_arrivals)
        else:
            self._finish()

    def _add_late_arrivals(self) -> None:
        # A member of a failed group must run alone, so it never joins an open transaction.
        more = [] if self._alone else self._gather()
        # New early writes would see uncommitted rows of this group. They go into the next group.
        self._waiting.extendleft(waiter for waiter in reversed(more) if waiter.is_early)
        more = [waiter for waiter in more if not waiter.is_early]
        self._in_group().extend(more)
        if self._run(more):
            self._finish()

    def _run(self, waiters: list[_Waiter]) -> bool:
        """Runs the operations. Returns False if one failed; the group has then ended."""
        for waiter in waiters:
            # A cancelled caller was promised nothing: its operation is not run. An early caller
            # that was already woken is skipped here only if the group is run again.
            if waiter.task is None:
                continue
            waiter.result = outcome.capture(waiter.op, self._connection)
            if isinstance(waiter.result, outcome.Error):
                self._end(waiter.result)
                return False
        return True

    def _finish(self) -> None:
        # A transaction that changed no row has nothing to sync. Its COMMIT is cheap enough for the
        # Trio thread, and the hop to the writer thread is saved.
        if self._connection.total_changes == self._changes_before:
            self._end(outcome.capture(self._commit))
        else:
            self._start(self._executor.start, self._commit, self._end)

    def _start(
        self,
        start: Callable[[Callable[[], None], Callable[[outcome.Outcome[Any]], None]], None],
        work: Callable[[], None],
        then: Callable[[outcome.Outcome[Any]], None],
    ) -> None:
        """Starts `work` in the writer thread.

        If the process has no thread or memory left, the group fails with Unavailable. Otherwise
        its callers would wait forever.
        """
        try:
            start(work, then)
        except (RuntimeError, MemoryError) as error:
            then(outcome.Error(Unavailable(f"no thread could be started: {error}")))

    def _end(self, ended: outcome.Outcome[Any]) -> None:
        group = self._in_group()
        if isinstance(ended, outcome.Error):
            if self._connection.in_transaction:
                self._connection.rollback()
            # A group of one has already run alone, so its error is its own result. It runs again
            # only if `on_error` removed the cause (a full disk).
            if self._on_error(ended.error) or len(group) > 1:
                self._alone.extend(group)
                group = []
            for waiter in group:
                waiter.result = ended
            self._token.run_sync_soon(self._begin)
        else:
            self._on_commit()
            # The next group starts before the callers of this one run, so that the writer thread
            # is not idle meanwhile.
            self._next_group()
        for waiter in group:
            waiter.wake()

    def _next_group(self) -> None:
        if self._waiting or self._alone:
            self._begin()
            return
        self._group = None
        if self._patient:
            self._begin_later()

    def _in_group(self) -> list[_Waiter]:
        assert self._group
        return self._group

    def _begin_immediate(self) -> None:
        # IMMEDIATE takes the write lock at once. A deferred transaction takes it at its first
        # write and could fail with SQLITE_BUSY in the middle of a group.
        self._connection.execute("BEGIN IMMEDIATE")

    def _commit(self) -> None:
        self._connection.execute("COMMIT")
        self.commit_count += 1


def _take(waiting: deque[_Waiter]) -> list[_Waiter]:
    return [waiting.popleft() for _ in range(min(len(waiting), _GROUP_OPS_MAX))]
