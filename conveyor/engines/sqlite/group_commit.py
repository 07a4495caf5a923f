"""Writer: group commit, one transaction for everybody who waits to write
(docs/engines.md, Group commit).

The operations of a group run on the Trio thread, one after the other; only the COMMIT, which is
the fsync, runs in the writer thread: one hop there and one back for a group, none per operation.

Why not all of it in the thread: every statement gives up the GIL and must win it back. Tasks that
claimed and settled per second, 64 and 200 at a time, beside a Trio thread that is always busy:

    statements run in     GIL switch interval     64 tasks     200 tasks
    the thread            5 ms                       0-600       0-1,000
    the thread            0.05 ms                    1,000         2,200
    Trio, COMMIT not      5 ms                      20-470     450-2,600
    Trio, COMMIT not      0.1 ms                     2,150         5,500

A thread that waits for the GIL starts its 5 ms anew whenever Trio looks at its sockets, and so may
starve for seconds: hence database.py's short interval.

A commit costs the same for one operation as for fifty. So whoever is in no hurry waits for company,
and a receive answers within its transaction, for the claims that follow to become part of it: 370
commits for 10,000 pages, where one for each step made 960.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import outcome
import trio

from conveyor.engines.sqlite.errors import is_busy, raise_translated
from conveyor.engines.sqlite.executor import BlockingExecutor, ThreadExecutor
from conveyor.ports.errors import Unavailable

T = TypeVar("T")
Op = Callable[[sqlite3.Connection], T]

# Keeps a group below about 10 ms of the Trio thread. A step of an ingest, 1,000 rows, takes as much
# by itself (measured: 9 to 12 ms).
_GROUP_OPS_MAX = 256
_COMPANY_S = 0.008

_UNKNOWN = outcome.Error(Unavailable("not written"))


class _Waiter:
    __slots__ = ("is_early", "op", "result", "task")

    def __init__(self, op: Op[Any], *, is_early: bool = False) -> None:
        self.op = op
        self.is_early = is_early
        self.task: trio.lowlevel.Task | None = trio.lowlevel.current_task()
        self.result: outcome.Outcome[Any] = _UNKNOWN

    async def answer(self) -> Any:
        try:
            return await trio.lowlevel.wait_task_rescheduled(self.leave)
        except sqlite3.Error as error:
            raise_translated(error)

    def leave(self, _: object) -> trio.lowlevel.Abort:
        """Cancelled: whether the write happens is then unknown."""
        self.task = None
        return trio.lowlevel.Abort.SUCCEEDED

    def wake(self) -> None:
        if self.task is not None:
            trio.lowlevel.reschedule(self.task, self.result)
            self.task = None


class GroupCommitter:
    """Owns the one connection that writes; `_group` is what has it in use, if anything has.

    An operation must be a function of the connection alone: when any of its group fails, the group
    is rolled back and all of it runs again, one by one, so that only the culprit fails.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        executor: BlockingExecutor | None = None,
        *,
        on_error: Callable[[BaseException], bool] = lambda _: False,
        on_commit: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_error` is told why a group failed, and answers whether it is worth another try."""
        self._connection = connection
        self._on_error = on_error
        self._on_commit = on_commit
        self._executor = executor or ThreadExecutor()
        self._token = trio.lowlevel.current_trio_token()
        self._waiting: deque[_Waiter] = deque()
        self._patient: deque[_Waiter] = deque()
        self._is_waiting_for_company = False
        self._alone: deque[_Waiter] = deque()
        self._group: list[_Waiter] | None = None
        self._changes_before = 0
        self.commit_count = 0

    async def write(self, op: Op[T]) -> T:
        """Runs `op` in a transaction; returns once that is durable."""
        result: T = await self._urgent(_Waiter(op))
        return result

    async def write_batched(self, op: Op[T]) -> T:
        """The same, but waits a little for somebody else's transaction before it begins one."""
        waiter = _Waiter(op)
        self._patient.append(waiter)
        if self._group is None:
            self._begin_later()
        result: T = await waiter.answer()
        return result

    async def write_early(self, op: Op[T]) -> T:
        """Returns as soon as `op` has run; what the caller writes next joins the transaction.

        Only for what may be lost: if the transaction fails, nothing tells the caller.
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
            # Not at once: whoever else is about to write in this turn comes along.
            self._token.run_sync_soon(self._begin)

    def _begin_later(self) -> None:
        if not self._is_waiting_for_company:
            self._is_waiting_for_company = True
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
        begun = outcome.capture(self._begin_immediate)
        if isinstance(begun, outcome.Error) and is_busy(begun.error):
            # Another process writes. Waiting for it is not for the Trio thread.
            self._start(self._executor.start_when_unlocked, self._begin_immediate, self._begun)
        else:
            self._begun(begun)

    def _gather(self) -> list[_Waiter]:
        """Early ones first: what they see, everybody may see, for nobody has written yet."""
        if self._alone:
            return [self._alone.popleft()]
        group = [*_take(self._waiting), *_take(self._patient)]
        return sorted(group, key=lambda waiter: not waiter.is_early)

    def _begun(self, begun: outcome.Outcome[Any]) -> None:
        if isinstance(begun, outcome.Error):
            self._end(begun)
            return
        self._changes_before = self._connection.total_changes
        group = self._in_group()
        if not self._run(group):
            return
        early = [waiter for waiter in group if waiter.is_early]
        for waiter in early:
            waiter.wake()
        if early:
            # They run in the next turn; what they write is here by the one after that.
            self._token.run_sync_soon(self._token.run_sync_soon, self._add_late_arrivals)
        else:
            self._finish()

    def _add_late_arrivals(self) -> None:
        more = [] if self._alone else self._gather()
        # It is too late to be early: they come in the next group.
        self._waiting.extendleft(waiter for waiter in reversed(more) if waiter.is_early)
        more = [waiter for waiter in more if not waiter.is_early]
        self._in_group().extend(more)
        if self._run(more):
            self._finish()

    def _run(self, waiters: list[_Waiter]) -> bool:
        """Whether all went well; if not, the group has ended."""
        for waiter in waiters:
            if waiter.task is None:
                continue
            waiter.result = outcome.capture(waiter.op, self._connection)
            if isinstance(waiter.result, outcome.Error):
                self._end(waiter.result)
                return False
        return True

    def _finish(self) -> None:
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
        """A process that is out of threads or memory tells its writers so: none waits for ever."""
        try:
            start(work, then)
        except (RuntimeError, MemoryError) as error:
            then(outcome.Error(Unavailable(f"no thread could be started: {error}")))

    def _end(self, ended: outcome.Outcome[Any]) -> None:
        group = self._in_group()
        if isinstance(ended, outcome.Error):
            if self._connection.in_transaction:
                self._connection.rollback()
            if self._on_error(ended.error) or len(group) > 1:
                self._alone.extend(group)
                group = []
            for waiter in group:
                waiter.result = ended
            self._token.run_sync_soon(self._begin)
        else:
            self._on_commit()
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
        self._connection.execute("BEGIN IMMEDIATE")

    def _commit(self) -> None:
        self._connection.execute("COMMIT")
        self.commit_count += 1


def _take(waiting: deque[_Waiter]) -> list[_Waiter]:
    return [waiting.popleft() for _ in range(min(len(waiting), _GROUP_OPS_MAX))]
