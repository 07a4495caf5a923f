"""Decides whether a gateway is down, or only fails for some targets (docs/engines.md, Gateways).

If a call could not be sent, the gateway is unreachable. A response such as 502 that says nothing
about the target, or no response at all, may be the fault of the gateway or of the target. Such a
failure is in doubt: the task is deferred, and later calls decide.

- If the target fails again, and the gateway answered other calls that began around the previous
  failure, the target is at fault, and the failure counts as an attempt. The start of a call
  matters, because a gateway that goes down may still answer calls that it accepted before. Each
  failure needs its own proof: a target that was at fault earlier may fail now because the gateway
  is down.
- If several targets fail in a row and no call is answered, the gateway is down and the circuit
  opens.
- If the same few targets fail and no other target is called, they are at fault after some time:
  soon if all were at fault before, otherwise after longer than most outages last.

One `GatewayHealth` covers the calls of one caller, so that the targets of one caller cannot stop
the calls of another. It is a value: each operation returns the next one. Time and randomness are
arguments.
"""

from __future__ import annotations

import msgspec

from conveyor.domain.backpressure.circuit import Circuit, ProbePolicy
from conveyor.domain.ids import Random
from conveyor.domain.timing import backoff_s

# Every gateway refuses a single connection at times, but not three in a row without an answer. A
# smaller value opens the circuit by accident; a larger one delays more tasks during an outage.
UNREACHABLE_TO_OPEN = 3
# Ten failures in a row of at least three targets. If three of ten targets always fail, this happens
# by chance once in 170,000 calls.
FAILURES_TO_OPEN = 10
TARGETS_TO_OPEN = 3
# Targets that were all at fault before stay in doubt this long if the gateway answered within
# LATELY_S before: the last pages of a run. With a target that never was, the gateway may be down.
DOUBT_S_AGAIN = 15.0
LATELY_S = 60.0
# Up to FEW_TARGETS stay in doubt this long if no other call was answered: twice the time of a long
# restart of a gateway.
DOUBT_S_FEW = 600.0
FEW_TARGETS = 20
# Many targets of one host stay in doubt this long if no other call was answered.
DOUBT_S_HOST = 3600.0
# A target in doubt is called again after 1 s, then after twice as long each time, up to 30 s.
RETRY_S_FIRST = 1.0
RETRY_S_MAX = 30.0
# Bounds the memory for one API key. Older doubts are dropped, because they decide nothing any more.
TARGETS_KEPT_MAX = 500
SPANS_KEPT = 8
# Two answered calls that began at most this far apart prove that the gateway worked in between. A
# larger value would count short outages as working time and blame targets for them.
SPAN_GAP_S = 2.0
# Only the difference between one host and several matters.
HOSTS_KEPT = 2

# A probe without an answer after 30 s may hang until its deadline, so another probe starts.
PROBES = ProbePolicy(first_s=1.0, delay_s_max=30.0, lost_after_s=30.0)


class Doubt(msgspec.Struct, frozen=True):
    """A target that failed in a way that does not show whose fault it was.

    Its latest call began at `last_at`. `is_alone`: no other target had failed since the last
    answer. `is_at_fault`: the target was found to be at fault before.
    """

    last_at: float
    count: int
    is_alone: bool
    is_at_fault: bool = False


class Streak(msgspec.Struct, frozen=True):
    """The failures in doubt since the last answer, with enough targets and hosts to decide.

    `suspects` are the targets that were never found to be at fault. `count` is the number of their
    failures: only these are evidence that the gateway is down.
    """

    count: int = 0
    began_at: float = 0.0
    hosts: frozenset[str] = frozenset()
    targets: frozenset[str] = frozenset()
    suspects: frozenset[str] = frozenset()

    def lengthen(self, target: str, host: str, now: float, *, is_suspect: bool) -> Streak:
        is_full = len(self.targets) > FEW_TARGETS
        targets = self.targets if is_full else self.targets | {target}
        return Streak(
            self.count + is_suspect,
            self.began_at if self.targets else now,
            self.hosts if len(self.hosts) >= HOSTS_KEPT else self.hosts | {host},
            targets,
            self.suspects | ({target} & targets) if is_suspect else self.suspects - {target},
        )


class GatewayHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The evidence about one gateway. `spans` are the latest intervals in which answered calls
    began, with no gap above `SPAN_GAP_S`: the gateway worked during them.
    """

    circuit: Circuit = Circuit(policy=PROBES)
    streak: Streak = Streak()
    doubts: dict[str, Doubt] = {}
    spans: tuple[tuple[float, float], ...] = ()
    unreachable_in_row: int = 0

    def note_answer(self, *, began_at: float, target: str | None = None) -> GatewayHealth:
        """Records a response, good or bad, that proves that the gateway works. Its target is no
        longer in doubt.
        """
        doubts = self.doubts
        if target in doubts:
            doubts = {name: doubt for name, doubt in doubts.items() if name != target}
        return msgspec.structs.replace(
            self,
            doubts=doubts,
            circuit=self.circuit if self.circuit.is_closed else self.circuit.close(),
            streak=Streak(),
            spans=_extend(self.spans, began_at),
            unreachable_in_row=0,
        )

    def note_unreachable(self, *, now: float, probe: int | None, random: Random) -> GatewayHealth:
        """Records a call that could not be sent. The target is not the cause."""
        in_row = self.unreachable_in_row + 1
        health = msgspec.structs.replace(self, unreachable_in_row=in_row)
        if probe is None and in_row < UNREACHABLE_TO_OPEN:
            return health
        return _open(health, probe, now, random)

    def note_failure(
        self,
        target: str,
        host: str,
        *,
        began_at: float,
        now: float,
        probe: int | None,
        random: Random,
    ) -> tuple[GatewayHealth, bool]:
        """Records a failure in doubt. The second value states whether the target is at fault
        according to the evidence so far.
        """
        before = self.doubts.get(target)
        is_at_fault = before is not None and self._is_proven(before)
        was_at_fault = before is not None and before.is_at_fault
        streak = self.streak
        if not (was_at_fault and is_at_fault):
            is_suspect = not (was_at_fault or is_at_fault)
            streak = streak.lengthen(target, host, now, is_suspect=is_suspect)
        doubt = Doubt(
            began_at,
            1 if before is None else before.count + 1,
            streak.targets <= {target},
            was_at_fault or is_at_fault,
        )
        health = msgspec.structs.replace(_keep(self, target, doubt), streak=streak)
        if is_at_fault:
            return health, True
        if _is_time_up(health, now):
            circuit = health.circuit.close()
            given_up = _keep(health, target, msgspec.structs.replace(doubt, is_at_fault=True))
            return msgspec.structs.replace(given_up, circuit=circuit), True
        is_away = streak.count >= FAILURES_TO_OPEN and len(streak.suspects) >= TARGETS_TO_OPEN
        return (_open(health, probe, now, random) if is_away or probe else health), False

    def retry_after_s(self, target: str, *, now: float) -> float:
        """Seconds until the next call to a target in doubt."""
        doubt = self.doubts.get(target)
        doublings = 0 if doubt is None else doubt.count - 1
        own_s = backoff_s(doublings, first_s=RETRY_S_FIRST, delay_s_max=RETRY_S_MAX)
        return own_s if self.circuit.is_closed else max(self.circuit.wait_s(now), RETRY_S_FIRST)

    def _is_proven(self, doubt: Doubt) -> bool:
        """Whether the gateway worked when the target's last failed call began.

        It did if calls that began before and after were answered, or if this target alone failed
        and a call that began later was answered.
        """
        if not self.circuit.is_closed:
            return False
        is_covered = any(began <= doubt.last_at <= ended for began, ended in self.spans)
        is_followed = bool(self.spans) and self.spans[-1][1] > doubt.last_at
        return is_covered or (doubt.is_alone and is_followed)


def _extend(
    spans: tuple[tuple[float, float], ...], began_at: float
) -> tuple[tuple[float, float], ...]:
    """Adds an answered call to the spans. Responses arrive in another order than calls begin."""
    near = [
        (start, end) for start, end in spans if start - SPAN_GAP_S <= began_at <= end + SPAN_GAP_S
    ]
    joined = (
        min([began_at, *(start for start, _ in near)]),
        max([began_at, *(end for _, end in near)]),
    )
    return tuple(sorted([*(span for span in spans if span not in near), joined])[-SPANS_KEPT:])


def _is_time_up(health: GatewayHealth, now: float) -> bool:
    """Whether targets that failed for so long, without calls to others, count as at fault."""
    streak = health.streak
    failing_s = now - streak.began_at
    if not streak.suspects and failing_s >= DOUBT_S_AGAIN:
        answered_at = health.spans[-1][1] if health.spans else float("-inf")
        if answered_at >= streak.began_at - LATELY_S:
            return True
    if len(streak.targets) <= FEW_TARGETS:
        return failing_s >= DOUBT_S_FEW
    return len(streak.hosts) < HOSTS_KEPT and failing_s >= DOUBT_S_HOST


def _open(health: GatewayHealth, probe: int | None, now: float, random: Random) -> GatewayHealth:
    circuit = (
        health.circuit.trip(now=now, random=random)
        if probe is None
        else health.circuit.fail_probe(probe, now=now, random=random)
    )
    return msgspec.structs.replace(health, circuit=circuit)


def _keep(health: GatewayHealth, target: str, doubt: Doubt) -> GatewayHealth:
    """Stores a doubt. Above the limit, the older half is dropped."""
    doubts = {**health.doubts, target: doubt}
    if len(doubts) > TARGETS_KEPT_MAX:
        oldest = sorted(doubts, key=lambda name: doubts[name].last_at)
        for name in oldest[: TARGETS_KEPT_MAX // 2]:
            del doubts[name]
    return msgspec.structs.replace(health, doubts=doubts)
