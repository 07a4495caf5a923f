"""Shares: a few permits for all callers, of which no caller can hold all.

A caller that waits is served before others that have used more lately, so that a caller who asks
for little never stands behind one who asks for everything. With one key or with forty, what an
attacker has used counts against each of its keys; a key that was never seen has used nothing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

import msgspec
import trio

# What was used this long ago counts half: a burst is forgotten within minutes.
USAGE_HALF_LIFE_S = 30.0
# Differences below this do not order callers: honest ones differ by as much.
USAGE_GRAIN_S = 1.0
# Callers whose use is remembered; the one that was idle longest is forgotten first.
ACCOUNTS_MAX = 4096


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """How many permits there are, and how many of them a caller may hold: `initial` at first, half
    as many (down to `min`) after each use that was slow, one more (up to `max`) after each that
    was not.
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


class _Waiter:
    __slots__ = ("granted", "is_granted", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.granted = trio.Event()
        self.is_granted = False


class FairPermits:
    """Every `acquire` is followed by one `release` with the same caller.

    `on_contention` is called when a caller has to wait though its own share is not used up.
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
        """Whether a caller waits for permits that others hold."""
        return self._waiters_count > 0 and any(
            account.waiting and account.held_count < account.share
            for account in self._accounts.values()
        )

    def acquire_nowait(self, caller: str) -> bool:
        account = self._account(caller)
        if not self._free_count or account.held_count >= account.share:
            return False
        self._grant(account)
        return True

    async def acquire(self, caller: str) -> None:
        if self.acquire_nowait(caller):
            return
        account = self._account(caller)
        self._number += 1
        waiter = _Waiter(self._number)
        account.waiting.append(waiter)
        self._waiters_count += 1
        try:
            if self._on_contention is not None and account.held_count < account.share:
                self._on_contention()
            await waiter.granted.wait()
        except BaseException:
            if waiter.is_granted:
                self.release(caller)
            else:
                account.waiting.remove(waiter)
                self._waiters_count -= 1
            raise

    def release(self, caller: str, used_s: float = 0.0, *, is_slow: bool | None = None) -> None:
        """Gives a permit back. `is_slow` says what its use means for the caller's share."""
        self.detach(caller, used_s, is_slow=is_slow)
        self.settle(caller)

    def detach(self, caller: str, used_s: float, *, is_slow: bool | None = None) -> None:
        """Frees a permit for others, while it still counts against the caller's own share; the
        caller's `settle` follows.
        """
        account = self._accounts[caller]
        account.charge(used_s, trio.current_time())
        if is_slow is not None:
            share = account.share // 2 if is_slow else account.share + 1
            account.share = max(self._bounds.min, min(self._bounds.max, share))
        self._free_count += 1
        self._serve()

    def settle(self, caller: str, used_s: float = 0.0) -> None:
        """Ends a use whose permit was detached."""
        account = self._accounts[caller]
        account.held_count -= 1
        account.charge(used_s, trio.current_time())
        self._serve()
        self._forget()

    def _serve(self) -> None:
        while self._free_count and self._waiters_count:
            account = self._next_account()
            if account is None:
                return
            waiter = account.waiting.popleft()
            self._waiters_count -= 1
            self._grant(account)
            waiter.is_granted = True
            waiter.granted.set()

    def _next_account(self) -> _Account | None:
        now = trio.current_time()
        eligible = [
            account
            for account in self._accounts.values()
            if account.waiting and account.held_count < account.share
        ]
        return min(eligible, key=lambda account: _rank(account, now), default=None)

    def _grant(self, account: _Account) -> None:
        account.held_count += 1
        self._free_count -= 1

    def _account(self, caller: str) -> _Account:
        account = self._accounts.get(caller)
        if account is None:
            account = self._accounts[caller] = _Account(self._bounds.initial)
        self._accounts.move_to_end(caller)
        return account

    def _forget(self) -> None:
        """Drops the account that was idle longest; those in use are kept, however many."""
        if len(self._accounts) <= ACCOUNTS_MAX:
            return
        for caller, account in self._accounts.items():
            if not account.held_count and not account.waiting:
                del self._accounts[caller]
                return


def _rank(account: _Account, now: float) -> tuple[int, int, int]:
    usage = int(account.usage_s(now) / USAGE_GRAIN_S)
    return usage, account.held_count, account.waiting[0].number
