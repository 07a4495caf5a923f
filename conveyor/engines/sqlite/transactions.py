"""TransactionCommitter: the operations of SQLite that wait at the same time share one transaction
(docs/engines.md, Group commit).

The problem: a durable write ends with an fsync, and an fsync costs more than the rest of the write.
It costs the same for one write as for fifty. So the callers that wait at the same time form a
group (engines/group_commit.py), and one fsync serves the group.

The operations of a transaction run on the Trio thread, one after the other. Only the COMMIT, which
is the fsync, runs in the writer thread. A group needs one hop to that thread and one hop back, and
an operation needs none.

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
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
import outcome
import trio

from conveyor.engines.executor import DiskExecutor, ThreadExecutor
from conveyor.engines.group_commit import GroupCommit, Waiter
from conveyor.engines.sqlite.errors import is_busy, raise_translated
from conveyor.ports.errors import Unavailable

T = TypeVar("T")
Op = Callable[[sqlite3.Connection], T]

# Limits a group to about 10 ms of the Trio thread. A larger value delays every other task of the
# process; a smaller one needs more commits. One ingest step of 1,000 rows takes as long by itself
# (measured: 9 to 12 ms).
_GROUP_OPS_MAX = 256


class _Operation(msgspec.Struct, eq=False):
    op: Op[Any]
    is_early: bool = False
    # After its group failed, an operation runs in a transaction of its own.
    runs_alone: bool = False


_Waiter = Waiter[_Operation, Any]


class TransactionCommitter:
    """Owns the only writing connection. `_group` is the group that uses it.

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
        self._groups: GroupCommit[_Operation, Any] = GroupCommit(
            self._begin, group_max=_GROUP_OPS_MAX
        )
        self._group: list[_Waiter] = []
        self._changes_before = 0
        self.commit_count = 0

    async def write(self, op: Op[T]) -> T:
        """Runs `op` in a transaction. Returns once that transaction is durable."""
        try:
            result: T = await self._groups.write(_Operation(op))
        except sqlite3.Error as error:
            raise_translated(error)
        return result

    async def write_batched(self, op: Op[T]) -> T:
        """Like `write`, but waits a few milliseconds for another caller's transaction to join."""
        try:
            result: T = await self._groups.write_batched(_Operation(op))
        except sqlite3.Error as error:
            raise_translated(error)
        return result

    async def write_early(self, op: Op[T]) -> T:
        """Returns as soon as `op` has run. The caller's next write joins the same transaction.

        Use it only for writes that may be lost: if the transaction fails, the caller is not
        informed.
        """
        try:
            result: T = await self._groups.write(_Operation(op, is_early=True))
        except sqlite3.Error as error:
            raise_translated(error)
        return result

    def _begin(self) -> None:
        self._group = self._take_group()
        beginning = outcome.capture(self._begin_immediate)
        if isinstance(beginning, outcome.Error) and is_busy(beginning.error):
            # Another process holds the write lock. The writer thread waits for it, because the
            # Trio thread must not block.
            start = partial(self._executor.start_when_unlocked, is_locked=is_busy)
            self._start(start, self._begin_immediate, self._run_group)
        else:
            self._run_group(beginning)

    def _take_group(self) -> list[_Waiter]:
        """Returns the next group, early writes first.

        An early write returns its result before the commit. It must therefore see committed rows
        only, and it does, because no other operation of the group has run yet.
        """
        if self._must_run_alone():
            return [self._groups.take_first()]
        return sorted(self._groups.take(), key=lambda waiter: not waiter.write.is_early)

    def _must_run_alone(self) -> bool:
        first = self._groups.first
        return first is not None and first.write.runs_alone

    def _run_group(self, beginning: outcome.Outcome[Any]) -> None:
        if isinstance(beginning, outcome.Error):
            self._end(beginning)
            return
        self._changes_before = self._connection.total_changes
        if not self._run(self._group):
            return
        early = [waiter for waiter in self._group if waiter.write.is_early]
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
        more = [] if self._must_run_alone() else self._take_group()
        # New early writes would see uncommitted rows of this group. They go into the next group.
        self._groups.put_back(waiter for waiter in more if waiter.write.is_early)
        more = [waiter for waiter in more if not waiter.write.is_early]
        self._group.extend(more)
        if self._run(more):
            self._finish()

    def _run(self, waiters: list[_Waiter]) -> bool:
        """Runs the operations. Returns False if one failed; the group has then ended."""
        for waiter in waiters:
            # A cancelled caller was promised nothing: its operation is not run. An early caller
            # that was already woken is skipped here only if the group is run again.
            if waiter.task is None:
                continue
            waiter.result = outcome.capture(waiter.write.op, self._connection)
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
        group, self._group = self._group, []
        has_failed = isinstance(ended, outcome.Error)
        if isinstance(ended, outcome.Error):
            if self._connection.in_transaction:
                self._connection.rollback()
            # A group of one has already run alone, so its error is its own result. It runs again
            # only if `on_error` removed the cause (a full disk).
            if self._on_error(ended.error) or len(group) > 1:
                for waiter in group:
                    waiter.write.runs_alone = True
                self._groups.put_back(group)
                group = []
            for waiter in group:
                waiter.result = ended
        else:
            self._on_commit()
        self._groups.end(group, has_failed=has_failed)

    def _begin_immediate(self) -> None:
        # IMMEDIATE takes the write lock at once. A deferred transaction takes it at its first
        # write and could fail with SQLITE_BUSY in the middle of a group.
        self._connection.execute("BEGIN IMMEDIATE")

    def _commit(self) -> None:
        self._connection.execute("COMMIT")
        self.commit_count += 1
