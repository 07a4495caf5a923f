"""Limits per host: fetches at the same time, and fetches a second (SPEC.md 4.8)."""

from __future__ import annotations

import msgspec

from conveyor.domain import limits


class HostLimit(msgspec.Struct, frozen=True, omit_defaults=True):
    """Limits for one host. None means no limit."""

    concurrency: int | None = None  #: Fetches at the same time.
    rate_per_s: float | None = None  #: Fetches that may begin per second.


class HostLimits(msgspec.Struct, frozen=True, omit_defaults=True):
    """Limits for every host of a job, with exceptions for named hosts."""

    every: HostLimit  #: The limit of each host that is not named.
    hosts: dict[str, HostLimit] = {}  #: The limits of named hosts.

    def limit_for(self, host: str) -> HostLimit:
        return self.hosts.get(host, self.every)


def host_interval_s(limit: HostLimit, *, fetch_s: float) -> float:
    """Seconds between two fetches of a host if only its limit delays them."""
    spacing_s = 1.0 / limit.rate_per_s if limit.rate_per_s else 0.0
    service_s = fetch_s / limit.concurrency if limit.concurrency else 0.0
    return max(spacing_s, service_s)


def host_wait_s(turn_at: float, *, now: float, is_sure: bool) -> float:
    """Seconds for which a message stays hidden while its host is at its limit.

    It is the time until its turn, within bounds. If the pace of the host is only estimated
    (`is_sure` is False), it is at most BOUNCE_S_MIN.
    """
    longest_s = limits.BOUNCE_S_MAX if is_sure else limits.BOUNCE_S_MIN
    return min(max(turn_at - now, limits.HOST_WAIT_S_MIN), longest_s)
