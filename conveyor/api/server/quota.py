"""Quotas on requests: how often and how many at once, by caller and by client address
(SPEC.md 4.21).

They are counted in this process; what callers have stored is counted from rows
(conveyor/usecases/quota.py).
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import trio

from conveyor.api.server.request_context import RequestContext, Response, json_reply
from conveyor.domain.ids import CallerId
from conveyor.domain.quota import Quota, QuotaExceeded, Quotas, TokenBucket
from conveyor.schemas.responses import QuotaResponse, QuotasResponse

# A client may make that many seconds' worth of requests at once.
BURST_S = 5.0
# For how long after its last request a caller counts among those of its address.
CALLER_S = 3600.0
# An audit reads every row: this many at once leave the loop to others.
AUDITS_MAX = 2
AUDIT_RETRY_S = 5.0
STREAM_RETRY_S = 30.0
ADDRESS_RETRY_S = 60.0
PRUNE_S = 60.0
_IPV6_NETWORK_BITS = 64


def group_address(text: str | None) -> str | None:
    """The address that a quota counts: of IPv6 the network that one client has to itself."""
    try:
        address = ipaddress.ip_address(text or "")
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, _IPV6_NETWORK_BITS), strict=False))
    return str(getattr(address, "ipv4_mapped", None) or address)


@dataclass(slots=True, eq=False)
class Held:
    """Places that are taken until they are released, at the latest when nothing refers to them: a
    stream whose client left before its first byte is never begun, and so never ended."""

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
    """The state behind the quotas on requests. `counts_addresses` where any key is accepted."""

    quotas: Quotas
    counts_addresses: bool = False
    _buckets: dict[tuple[Quota, str], TokenBucket] = field(default_factory=dict)
    _held: Counter[tuple[Quota, str]] = field(default_factory=Counter)
    _audits_count: int = 0
    _callers: dict[str, dict[CallerId, float]] = field(default_factory=dict)
    _pruned_at: float = 0.0

    def admit_request(self, caller: CallerId | None, address: str | None) -> None:
        """QuotaExceeded for a request too many."""
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
        """Takes a place for a stream, which must be given up; QuotaExceeded if there is none."""
        keys = [(Quota.STREAMS, str(caller))]
        if self.counts_addresses and address is not None:
            keys.append((Quota.ADDRESS_STREAMS, address))
        return self._hold(keys, retry_after_s=STREAM_RETRY_S)

    @contextmanager
    def hold_audit(self, caller: CallerId) -> Iterator[None]:
        limit = self.quotas.limit(Quota.AUDITS)
        if limit is not None and self._audits_count >= AUDITS_MAX:
            raise QuotaExceeded(Quota.AUDITS, AUDITS_MAX, retry_after_s=AUDIT_RETRY_S)
        held = self._hold([(Quota.AUDITS, str(caller))], retry_after_s=AUDIT_RETRY_S)
        self._audits_count += 1
        try:
            yield
        finally:
            self._audits_count -= 1
            held.release()

    def held_count(self, quota: Quota, name: str) -> int:
        return self._held[quota, name]

    def _hold(self, keys: list[tuple[Quota, str]], *, retry_after_s: float) -> Held:
        for key in keys:
            limit = self.quotas.limit(key[0])
            if limit is not None and self._held[key] >= limit:
                raise QuotaExceeded(key[0], limit, retry_after_s=retry_after_s)
        self._held.update(keys)
        return Held(self._held, keys)

    def _take(self, quota: Quota, name: str, *, per_s: float, burst_s: float = BURST_S) -> None:
        limit = self.quotas.limit(quota)
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
        """How many keys one address may use within an hour, where it can make up any number."""
        limit = self.quotas.limit(Quota.ADDRESS_CALLERS)
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
            kept = {each: at for each, at in callers.items() if at > now - CALLER_S}
            if kept:
                self._callers[address] = kept
            else:
                del self._callers[address]


async def list_quotas(call: RequestContext) -> Response:
    """The limits of this server, and what of each the caller has in use where that is counted."""
    limits = call.api.requests.quotas
    use = await call.api.storage.count(call.caller)
    used: dict[Quota, int | None] = {
        Quota.LIVE_RUNS: use.live_runs,
        Quota.OPEN_JOBS: use.open_jobs,
        Quota.STORED_TASKS: use.tasks,
        Quota.STORED_BYTES: use.bytes,
        Quota.UPLOAD_SLOTS: await call.api.storage.count_slots(call.caller),
        Quota.STREAMS: call.api.requests.held_count(Quota.STREAMS, call.caller),
        Quota.AUDITS: call.api.requests.held_count(Quota.AUDITS, call.caller),
    }
    shown = [
        QuotaResponse(name=quota, limit=limits.limit(quota), used=used.get(quota))
        for quota in Quota
    ]
    return json_reply(QuotasResponse(shown))
