"""Which page may begin next: limits, pauses and turns of the hosts of a list.

Pure: the time is an argument. Pages of different hosts take turns. A host has a limit of pages in
flight, an interval between two of them, and pauses. When it answers 429 or 503 its limit is halved
and it is paused; with each round of pages that succeed the limit grows by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from ipaddress import ip_address

# Pages of one public host in flight, unless the caller says otherwise. Browsers use six.
PER_HOST = 8
# The pause after a host asked for fewer requests without naming a time; it doubles each time.
PAUSE_S = 1.0
PAUSE_S_MAX = 60.0
# A 503 may concern one page only. So many in a row concern the host.
UNAVAILABLE_STREAK = 3


class Host:
    """The state of one host. `limit` is None if nothing bounds its pages in flight."""

    __slots__ = (
        "answered",
        "ceiling",
        "doublings",
        "inflight",
        "interval_s",
        "is_blocked",
        "is_listed",
        "limit",
        "name",
        "next_at",
        "paused_until",
        "ready",
        "seconds",
        "streak",
        "successes",
        "throttled",
        "timer_at",
    )

    def __init__(self, name: str, limit: int | None, interval_s: float) -> None:
        self.name = name
        self.ready: deque[int] = deque()
        self.inflight = 0
        self.ceiling = limit
        self.limit = limit
        self.interval_s = interval_s
        self.next_at = 0.0
        self.paused_until = 0.0
        self.timer_at = 0.0
        self.is_blocked = False
        self.is_listed = False
        self.doublings = 0
        self.streak = 0
        self.successes = 0
        self.throttled = 0
        self.answered = 0
        self.seconds = 0.0

    @property
    def is_full(self) -> bool:
        return self.limit is not None and self.inflight >= self.limit

    @property
    def mean_s(self) -> float:
        return self.seconds / self.answered if self.answered else 0.0

    def begin_round(self) -> None:
        """Forgets the queue of pages that have ended. Limit, pace and pause stay."""
        assert not self.ready
        assert not self.inflight
        self.timer_at = 0.0


class Hosts:
    """The queue of all pages that have not ended, by host. `known` has the hosts of an earlier
    queue, whose pages have all ended."""

    def __init__(
        self,
        names: Sequence[str],
        limit_of: Callable[[str], Host],
        known: dict[str, Host] | None = None,
    ) -> None:
        self._names = names
        self._limit_of = limit_of
        self._hosts = {} if known is None else known
        for host in self._hosts.values():
            host.begin_round()
        self._ring: deque[Host] = deque()
        # Hosts and pages that wait for a time. The number keeps equal times in order.
        self._timers: list[tuple[float, int, Host | int]] = []
        self._number = 0
        self.paused_until = 0.0

    def host(self, index: int) -> Host:
        name = self._names[index]
        host = self._hosts.get(name)
        if host is None:
            host = self._hosts[name] = self._limit_of(name)
        return host

    def all(self) -> list[Host]:
        return list(self._hosts.values())

    @property
    def has_ready(self) -> bool:
        return bool(self._ring)

    def add(self, index: int, now: float) -> None:
        host = self.host(index)
        host.ready.append(index)
        self._list(host, now)

    def add_later(self, index: int, at: float) -> None:
        self._push(at, index)

    def take(self, now: float) -> int | None:
        """Returns the next page that may begin, or None."""
        self.release(now)
        if not self._ring or self.paused_until > now:
            return None
        host = self._ring[0]
        index = host.ready.popleft()
        host.inflight += 1
        if host.interval_s:
            host.next_at = max(host.next_at, now) + host.interval_s
            self._unlist(host)
            self._list(host, now)
        elif not host.ready or host.is_full:
            self._unlist(host)
        elif len(self._ring) > 1:
            self._ring.rotate(-1)
        return index

    def release(self, now: float) -> bool:
        """Ends the waits whose time has come. Returns whether a page may begin."""
        while self._timers and self._timers[0][0] <= now:
            what = heappop(self._timers)[2]
            if isinstance(what, int):
                self.add(what, now)
            else:
                what.timer_at = 0.0
                self._list(what, now)
        return bool(self._ring) and self.paused_until <= now

    def forgo(self, index: int, now: float) -> None:
        """Ends a page that was taken and needs no request, so the next one may take its turn."""
        host = self.host(index)
        host.next_at -= host.interval_s
        self.end(index, now)

    def put_back(self, index: int) -> None:
        """Returns a page that was taken and did not begin. Its host is blocked until `unblock`."""
        host = self.host(index)
        host.inflight -= 1
        host.next_at -= host.interval_s
        host.ready.appendleft(index)
        host.is_blocked = True
        if host.is_listed:
            self._ring.remove(host)
            host.is_listed = False

    def unblock(self, host: Host, now: float) -> None:
        host.is_blocked = False
        self._list(host, now)

    def end(self, index: int, now: float) -> None:
        """A page that was taken is no longer in flight."""
        host = self.host(index)
        host.inflight -= 1
        if not host.is_listed and host.ready:
            self._list(host, now)

    def succeed(self, host: Host, seconds: float) -> None:
        host.answered += 1
        host.seconds += seconds
        if not host.throttled:
            return
        host.streak = 0
        host.successes += 1
        if host.limit is not None and host.successes >= host.limit:
            host.successes = 0
            host.doublings = 0
            if host.ceiling is None or host.limit < host.ceiling:
                host.limit += 1

    def throttle(
        self, host: Host, now: float, *, retry_after_s: float | None, is_explicit: bool
    ) -> bool:
        """The host asked for fewer requests. Returns whether it is slowed down now.

        `is_explicit` is False for a 503 without Retry-After, which may concern one page only.
        """
        host.throttled += 1
        host.streak += 1
        if not is_explicit and host.streak < UNAVAILABLE_STREAK:
            return False
        if host.paused_until > now and retry_after_s is None:
            return True  # An answer to a request that was sent before the pause.
        host.limit = max(1, min(host.limit or host.inflight, host.inflight) // 2)
        host.successes = 0
        pause_s = min(PAUSE_S * 2.0**host.doublings, PAUSE_S_MAX)
        host.doublings = min(host.doublings + 1, 16)
        host.paused_until = max(host.paused_until, now + max(retry_after_s or 0.0, pause_s))
        if host.is_listed:
            self._ring.remove(host)
            host.is_listed = False
            self._list(host, now)
        return True

    def wake_at(self, now: float) -> float | None:
        """Returns when `take` may return another page without one that ends first."""
        if self.paused_until > now:
            return self.paused_until
        return self._timers[0][0] if self._timers else None

    def _list(self, host: Host, now: float) -> None:
        if host.is_listed or host.is_blocked or not host.ready or host.is_full:
            return
        at = max(host.paused_until, host.next_at)
        if at > now:
            # One timer is enough: when it ends, the time is looked at again.
            if not host.timer_at:
                host.timer_at = at
                self._push(at, host)
            return
        host.is_listed = True
        self._ring.append(host)

    def _unlist(self, host: Host) -> None:
        """Removes the host at the head of the ring."""
        self._ring.popleft()
        host.is_listed = False

    def _push(self, at: float, what: Host | int) -> None:
        self._number += 1
        heappush(self._timers, (at, self._number, what))


def is_private_host(name: str) -> bool:
    """Whether a host is this machine or one of its network, by its name or literal address."""
    try:
        address = ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
    return address.is_private or address.is_loopback
