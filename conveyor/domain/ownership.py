"""Ownership: which workers process a run, or a kind of background work
(docs/architecture.md, Ownership; decision 0029).

Without it, every worker asks for the work of every run: most of the calls of a fleet find nothing.
So all workers put themselves into the same order for each subject (rendezvous hashing), and the
first ones own it. When a worker comes or goes, only the subjects that it owns move.

Ownership only saves calls. It is computed from reports that may be old, so two workers may own the
same subject, and claims, leases, epochs and versions protect the work as if all of them did.
A worker that has no recent reports owns everything, so no subject stays without an owner.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import msgspec

from conveyor.domain import limits

# A worker owns a run for each part of this size of its slots that the tasks of the run can fill.
# With a larger part, a few long runs can meet on one worker while others idle. With a smaller one,
# short runs are polled by more workers.
SLOTS_SHARE = 4


class LiveWorkers(msgspec.Struct, frozen=True):
    """The workers that were reported as alive, and when the reports were read."""

    workers: frozenset[str]
    seen_at: float

    def is_recent(self, now: float) -> bool:
        return 0 <= now - self.seen_at < limits.PRESENCE_TTL_S


def owners_wanted(*, tasks: int, cap: int, slots: int) -> int:
    """Returns how many workers with this many slots the tasks of a run can use; at least one."""
    share = max(1, slots // SLOTS_SHARE)
    return max(1, -(-min(tasks, cap) // share))


def is_owner(
    worker: str, subject: str, live: LiveWorkers | None, *, count: int = 1, now: float
) -> bool:
    """Returns whether the worker is one of the first `count` in the order of the subject."""
    if live is None or not live.is_recent(now):
        return True
    others = live.workers - {worker}
    if len(others) < count:
        return True
    own = _weight(worker, subject)
    return sum(_weight(other, subject) > own for other in others) < count


def owners_of(subject: str, workers: Iterable[str], *, count: int = 1) -> list[str]:
    """Returns the first `count` workers in the order of the subject."""
    return sorted(workers, key=lambda worker: _weight(worker, subject), reverse=True)[:count]


def _weight(worker: str, subject: str) -> tuple[bytes, str]:
    return blake2b(f"{worker}/{subject}".encode(), digest_size=8).digest(), worker
