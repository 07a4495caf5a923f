"""Shares a few permits among all callers, so that no caller can hold all of them.

A free permit goes to the waiting caller with the lowest recent usage. A caller with few requests
therefore does not wait behind a caller with many. Usage is counted per caller name. A caller that
is not known yet has a usage of zero.

One use may need several permits, such as the bytes of a body. It gets all of them at once or waits
for them: a use that held some of them while it waited for the others could deadlock with another.
No smaller use of another caller passes the one that is served next, so a large use cannot starve.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

import msgspec
import trio

# Usage counts half after this time, so that a burst has no effect after a few minutes. A larger
# value penalises a burst for longer; a smaller one forgets a caller that never stops too early.
USAGE_HALF_LIFE_S = 30.0
# Usage is compared in steps of this size, because honest callers differ by as much. Within one step
# the caller with fewer permits, then the one that has waited longest, is served first.
USAGE_GRAIN_S = 1.0
# Bounds the memory of the usage table. The caller that was idle longest is dropped first.
ACCOUNTS_MAX = 4096


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """The number of permits in total, and the share of one caller.

    The share starts at `initial`. Each slow use halves it, down to `min`. Each other use that was
    judged raises it by one, up to `max`.
    """

    total: int
    initial: int
    min: int
    max: int

    @classmethod
    def fixed(cls, total: int, per_caller: int) -> Bounds:
        return cls(total=total, initial=per_caller, min=per_caller, max=per_caller)


class _Account:
    __slots__ = ("_used_at", "_used_s", "held_count", "share", "waiting")

    def __init__(self, share: int) -> None:
        self.share = share
        self.held_count = 0
        self.waiting: deque[_Waiter] = deque()
        self._used_s = 0.0
        self._used_at = 0.0

    def charge(self, seconds: float, now: float) -> None:
        self._used_s = self.usage_s(now) + seconds
        self._used_at = now

    def usage_s(self, now: float) -> float:
        return float(self._used_s * 0.5 ** ((now - self._used_at) / USAGE_HALF_LIFE_S))

    def has_room(self, count: int) -> bool:
        return self.held_count + count <= self.share


class _Waiter:
    __slots__ = ("count", "granted", "is_granted", "number")

    def __init__(self, number: int, count: int) -> None:
        self.number = number
        self.count = count
        self.granted = trio.Event()
        self.is_granted = False


class FairPermits:
    """Every `acquire` is followed by one `release` (or `detach` and `settle`) for the same caller
    and count. A count above the share of a caller is never granted.

    `on_contention` is called when a caller has to wait although it holds less than its share.
    """

    def __init__(self, bounds: Bounds, *, on_contention: Callable[[], None] | None = None) -> None:
        self._bounds = bounds
        self._on_contention = on_contention
        self._free_count = bounds.total
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        self._waiters_count = 0
        self._number = 0

    @property
    def free_count(self) -> int:
        return self._free_count

    @property
    def is_contended(self) -> bool:
        """Whether a caller that holds less than its share waits: other callers hold the permits."""
        return self._waiters_count > 0 and any(
            account.waiting and account.has_room(account.waiting[0].count)
            for account in self._accounts.values()
        )

    def acquire_nowait(self, caller: str, count: int = 1) -> bool:
        account = self._account(caller)
        if self._free_count < count or not account.has_room(count):
            return False
        if self._waiters_count and self._next_account() is not None:
            return False  # A waiter that may have more needs what is free.
        self._grant(account, count)
        return True

    async def acquire(self, caller: str, count: int = 1) -> None:
        if self.acquire_nowait(caller, count):
            return
        account = self._account(caller)
        self._number += 1
        waiter = _Waiter(self._number, count)
        account.waiting.append(waiter)
        self._waiters_count += 1
        self._serve()  # This caller may come before those that wait.
        try:
            if (
                self._on_contention is not None
                and not waiter.is_granted
                and account.has_room(count)
            ):
                self._on_contention()
            await waiter.granted.wait()
        except BaseException:
            # A permit can be granted and the wait cancelled before this task runs again.
            if waiter.is_granted:
                self.release(caller, count=count)
            else:
                account.waiting.remove(waiter)
                self._waiters_count -= 1
                # The next use may need less than this one.
                self._serve()
            raise

    def release(
        self, caller: str, used_s: float = 0.0, *, count: int = 1, is_slow: bool | None = None
    ) -> None:
        """Returns permits: those of a use, or a part of them that it does not need any more.
        `is_slow` lowers or raises the caller's share; None leaves it."""
        account = self._accounts[caller]
        account.held_count -= count
        self._free(account, used_s, count, is_slow)
        self._forget()

    def detach(self, caller: str, used_s: float, *, is_slow: bool | None = None) -> None:
        """Frees a permit for other callers while it still counts against this caller's share.

        The holder calls `settle` later.
        """
        self._free(self._accounts[caller], used_s, 1, is_slow)

    def settle(self, caller: str, used_s: float = 0.0) -> None:
        """Ends a use whose permit was freed with `detach`."""
        account = self._accounts[caller]
        account.held_count -= 1
        account.charge(used_s, trio.current_time())
        self._serve()
        self._forget()

    def _free(self, account: _Account, used_s: float, count: int, is_slow: bool | None) -> None:
        account.charge(used_s, trio.current_time())
        if is_slow is not None:
            share = account.share // 2 if is_slow else account.share + 1
            account.share = max(self._bounds.min, min(self._bounds.max, share))
        self._free_count += count
        self._serve()

    def _serve(self) -> None:
        while self._free_count and self._waiters_count:
            account = self._next_account()
            if account is None or account.waiting[0].count > self._free_count:
                return
            waiter = account.waiting.popleft()
            self._waiters_count -= 1
            self._grant(account, waiter.count)
            waiter.is_granted = True
            waiter.granted.set()

    def _next_account(self) -> _Account | None:
        now = trio.current_time()
        eligible = [
            account
            for account in self._accounts.values()
            if account.waiting and account.has_room(account.waiting[0].count)
        ]
        return min(eligible, key=lambda account: _rank(account, now), default=None)

    def _grant(self, account: _Account, count: int) -> None:
        account.held_count += count
        self._free_count -= count

    def _account(self, caller: str) -> _Account:
        account = self._accounts.get(caller)
        if account is None:
            account = self._accounts[caller] = _Account(self._bounds.initial)
        self._accounts.move_to_end(caller)
        return account

    def _forget(self) -> None:
        """Drops the account that was idle longest. Accounts in use are kept, even above the
        limit.
        """
        if len(self._accounts) <= ACCOUNTS_MAX:
            return
        for caller, account in self._accounts.items():
            if not account.held_count and not account.waiting:
                del self._accounts[caller]
                return


def _rank(account: _Account, now: float) -> tuple[int, int, int]:
    usage = int(account.usage_s(now) / USAGE_GRAIN_S)
    return usage, account.held_count, account.waiting[0].number
