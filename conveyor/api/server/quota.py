"""Quotas on requests: how often and how many at once, by caller and by client address
(SPEC.md 4.21).

This process counts them in memory. Quotas on stored data are counted from rows
(conveyor/usecases/quota.py).
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import trio

from conveyor.domain.ids import CallerId
from conveyor.domain.quota import Quota, QuotaExceeded, Quotas

# A client may send the requests of this many seconds at once. A smaller value refuses short bursts.
BURST_S = 5.0
# A caller counts for its address until this long after its last request.
CALLER_S = 3600.0
# An audit reads every row of a run. More audits at the same time would delay other requests.
AUDITS_MAX = 2
# A page of results may read thousands of rows. Of one caller so many are read at the same time, of
# all callers PAGES_MAX; others wait for their turn. More would delay every other request.
CALLER_PAGES_MAX = 2
PAGES_MAX = 4
# The Retry-After values of the refusals.
AUDIT_RETRY_S = 5.0
STREAM_RETRY_S = 30.0
ADDRESS_RETRY_S = 60.0
# Full buckets and old callers are removed at this interval, which bounds the memory.
PRUNE_S = 60.0
_IPV6_NETWORK_BITS = 64


def group_address(text: str | None) -> str | None:
    """The address that a quota counts. For IPv6 it is the /64 network, which one client owns."""
    try:
        address = ipaddress.ip_address(text or "")
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, _IPV6_NETWORK_BITS), strict=False))
    return str(getattr(address, "ipv4_mapped", None) or address)


@dataclass(slots=True)
class TokenBucket:
    """Allows `rate_per_s` on average and bursts of up to `burst`."""

    rate_per_s: float
    burst: float
    tokens: float
    at: float

    @classmethod
    def full(cls, rate_per_s: float, burst: float, *, now: float) -> TokenBucket:
        return cls(rate_per_s, burst, burst, now)

    def take(self, now: float) -> float:
        """Takes a token; answers how many seconds to wait where there is none, else 0."""
        elapsed_s = max(0.0, now - self.at)
        self.tokens = min(self.burst, self.tokens + elapsed_s * self.rate_per_s)
        self.at = now
        if self.tokens < 1.0:
            return (1.0 - self.tokens) / self.rate_per_s
        self.tokens -= 1.0
        return 0.0

    def is_full(self, now: float) -> bool:
        return self.tokens + (now - self.at) * self.rate_per_s >= self.burst


@dataclass(slots=True, eq=False)
class Held:
    """Places that a request holds until `release`.

    The finaliser releases them too: the generator of a stream whose client left before the first
    byte is never started, so its `finally` never runs.
    """

    counts: Counter[tuple[Quota, str]]
    keys: list[tuple[Quota, str]]

    def release(self) -> None:
        keys, self.keys = self.keys, []
        for key in keys:
            self.counts[key] -= 1
            if not self.counts[key]:
                del self.counts[key]

    def __del__(self) -> None:
        self.release()


@dataclass(slots=True, eq=False)
class RequestQuotas:
    """The state of the quotas on requests. `counts_addresses` is set if any key is accepted."""

    quotas: Quotas
    counts_addresses: bool = False
    _buckets: dict[tuple[Quota, str], TokenBucket] = field(default_factory=dict)
    _held: Counter[tuple[Quota, str]] = field(default_factory=Counter)
    _audits_count: int = 0
    _pages: trio.Semaphore = field(default_factory=lambda: trio.Semaphore(PAGES_MAX))
    _caller_pages: dict[CallerId, trio.Semaphore] = field(default_factory=dict)
    _callers: dict[str, dict[CallerId, float]] = field(default_factory=dict)
    _pruned_at: float = 0.0

    def admit_request(self, caller: CallerId | None, address: str | None) -> None:
        """Counts a request. Raises QuotaExceeded."""
        self._prune()
        if caller is not None:
            self._take(Quota.REQUESTS_PER_S, caller, per_s=1.0)
        if self.counts_addresses and address is not None:
            self._take(Quota.ADDRESS_REQUESTS_PER_S, address, per_s=1.0)
            if caller is not None:
                self._admit_caller(caller, address)

    def admit_webhook_test(self, caller: CallerId) -> None:
        self._take(Quota.WEBHOOK_TESTS_PER_MIN, caller, per_s=1.0 / 60.0, burst_s=60.0)

    def hold_stream(self, caller: CallerId, address: str | None) -> Held:
        """Takes a place for a stream. The caller releases it. Raises QuotaExceeded."""
        keys = [(Quota.STREAMS, str(caller))]
        if self.counts_addresses and address is not None:
            keys.append((Quota.ADDRESS_STREAMS, address))
        return self._hold(keys, retry_after_s=STREAM_RETRY_S)

    @contextmanager
    def hold_audit(self, caller: CallerId) -> Iterator[None]:
        limit = self.quotas.get(Quota.AUDITS)
        if limit is not None and self._audits_count >= AUDITS_MAX:
            raise QuotaExceeded(Quota.AUDITS, AUDITS_MAX, retry_after_s=AUDIT_RETRY_S)
        held = self._hold([(Quota.AUDITS, str(caller))], retry_after_s=AUDIT_RETRY_S)
        self._audits_count += 1
        try:
            yield
        finally:
            self._audits_count -= 1
            held.release()

    @asynccontextmanager
    async def turn_to_page(self, caller: CallerId) -> AsyncGenerator[None, None]:
        """Waits until the caller may have another page of results read. Turns come in the order of
        the requests."""
        turns = self._caller_pages.setdefault(caller, trio.Semaphore(CALLER_PAGES_MAX))
        try:
            # The caller's turn first: a place of all callers is never held by one that waits.
            async with turns, self._pages:
                yield
        finally:
            if turns.value == CALLER_PAGES_MAX and not turns.statistics().tasks_waiting:
                self._caller_pages.pop(caller, None)

    def held_count(self, quota: Quota, name: str) -> int:
        return self._held[quota, name]

    def _hold(self, keys: list[tuple[Quota, str]], *, retry_after_s: float) -> Held:
        for key in keys:
            limit = self.quotas.get(key[0])
            if limit is not None and self._held[key] >= limit:
                raise QuotaExceeded(key[0], limit, retry_after_s=retry_after_s)
        self._held.update(keys)
        return Held(self._held, keys)

    def _take(self, quota: Quota, name: str, *, per_s: float, burst_s: float = BURST_S) -> None:
        limit = self.quotas.get(quota)
        if limit is None:
            return
        now = trio.current_time()
        rate_per_s = limit * per_s
        bucket = self._buckets.get((quota, name))
        if bucket is None:
            bucket = TokenBucket.full(rate_per_s, max(1.0, rate_per_s * burst_s), now=now)
            self._buckets[quota, name] = bucket
        wait_s = bucket.take(now)
        if wait_s:
            raise QuotaExceeded(quota, limit, retry_after_s=wait_s)

    def _admit_caller(self, caller: CallerId, address: str) -> None:
        """Limits the keys that one address uses within an hour: it can invent any number."""
        limit = self.quotas.get(Quota.ADDRESS_CALLERS)
        if limit is None:
            return
        callers = self._callers.setdefault(address, {})
        if caller not in callers and len(callers) >= limit:
            raise QuotaExceeded(Quota.ADDRESS_CALLERS, limit, retry_after_s=ADDRESS_RETRY_S)
        callers[caller] = trio.current_time()

    def _prune(self) -> None:
        now = trio.current_time()
        if now - self._pruned_at < PRUNE_S:
            return
        self._pruned_at = now
        full = [key for key, bucket in self._buckets.items() if bucket.is_full(now)]
        for key in full:
            del self._buckets[key]
        for address, callers in list(self._callers.items()):
            recent = {caller: at for caller, at in callers.items() if at > now - CALLER_S}
            if recent:
                self._callers[address] = recent
            else:
                del self._callers[address]
