"""Options: everything about a world that its seed decides before the world starts
(docs/simulator.md, How a world runs).

This is swarm testing: each seed switches most faults off and makes some of the others frequent. A
world with all faults at once would make no progress.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import msgspec

from conveyor.simulation.environment.conditions import Conditions, with_conditions
from conveyor.simulation.faults.faults import Fault
from conveyor.simulation.models.fault_rates import (
    CallFaults,
    CapacityLimits,
    DynamoFaults,
    FaultRates,
    RedisFaults,
    S3Faults,
    SqsFaults,
)
from conveyor.simulation.profiles import EVEN, with_profile

ENGINES = ("memory", "embedded", "aws")
"""The engines that a seed draws from. One more engine in this list would change the world of every
seed."""
ALL_ENGINES = (*ENGINES, "postgres", "mixed")
# One to four lifetimes of a claim (50 s): other workers take over the work of killed ones while
# faults are still on.
SAFETY_S = (50.0, 100.0, 200.0)
# Worlds make about 11,000 engine calls on average (tests/simulation/REPORT.md).
CALLS_MAX = 300_000
# The usual period of the sweeper: some sweeps must happen while faults are on.
SWEEP_S = 15.0
RETENTION_S = 20.0
"""Shorter than any phase with faults (`SAFETY_S`), so that messages really expire while faults are
on."""

_SITE = (
    Fault.SITE_NOT_FOUND,
    Fault.SITE_BLOCKED,
    Fault.SITE_FAILED,
    Fault.SITE_RATE_LIMITED,
    Fault.SITE_HUNG,
    Fault.SITE_DRIPPED,
    Fault.SITE_RESET,
    Fault.SITE_WRONG_LENGTH,
    Fault.SITE_EMPTY,
    Fault.SITE_TOO_LARGE,
    Fault.SITE_REDIRECTED,
    Fault.SITE_TLS_FAILED,
    Fault.SITE_ENDLESS,
)
_RECEIVER = (
    Fault.RECEIVER_FAILED,
    Fault.RECEIVER_HUNG,
    Fault.RECEIVER_RESET,
    Fault.RECEIVER_REDIRECTED,
    Fault.RECEIVER_RATE_LIMITED,
    Fault.RECEIVER_GONE,
    Fault.RECEIVER_TO_METADATA,
    Fault.RECEIVER_DRIPPED,
    Fault.RECEIVER_TOO_LARGE,
)
_CHOICES: Mapping[Fault, tuple[float, ...]] = {
    Fault.CALL_REFUSED: (0.0, 0.01, 0.05, 0.2),
    Fault.ANSWER_LOST: (0.0, 0.01, 0.05),
    Fault.CALL_SLOW: (0.0, 0.01, 0.03),
    Fault.KILLED_BEFORE: (0.0, 0.0005, 0.002),
    Fault.KILLED_AFTER: (0.0, 0.0005, 0.002),
    Fault.ACTOR_CRASHED: (0.0, 0.0, 0.0005),
    Fault.FALSE_EMPTY: (0.0, 0.1),
    Fault.EARLY_RETURN: (0.0, 0.1),
    Fault.DUPLICATE_DELIVERY: (0.0, 0.1),
    Fault.COMMIT_FAILED: (0.0, 0.01, 0.05),
    Fault.DISK_FULL: (0.0, 0.01),
    Fault.ACCOUNT_SPENT: (0.0, 0.0, 0.01),
    Fault.CLIENT_REPEATED: (0.0, 0.2, 0.5),
    Fault.CLIENT_REPEATED_AT_ONCE: (0.0, 0.2),
    Fault.CLIENT_HUNG_UP: (0.0, 0.05),
    Fault.CLIENT_REUSED_KEY: (0.0, 0.1),
    Fault.LIST_OVERWRITTEN: (0.0, 0.5),
    **dict.fromkeys(_SITE, (0.0, 0.0, 0.05, 0.2)),
    **dict.fromkeys(_RECEIVER, (0.0, 0.0, 0.3)),
    Fault.BEAT_SKIPPED: (0.0, 0.0, 0.5),
    Fault.READ_FAILED: (0.0, 0.02, 0.1),
    Fault.READ_BUSY: (0.0, 0.02, 0.1),
    Fault.BODY_TORN: (0.0, 0.1),
}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one world.

    `safety_s` is how long faults last, `liveness_s` how long runs may take to end afterwards.
    `disturb_s` is the mean time between two faults of a whole process (pause, terminate, restart)
    or engine (outage). `think_s` is the mean time that a site takes to answer, `latency_s` the
    usual latency of an engine call, `poll_s` how often actors poll. `offset_s`, `drift` and
    `step_s` bound the errors of wall clocks. `check_every` is the number of writes between two
    snapshots. `service_rates` has the fault rates of modelled services, `rates` those of all other
    faults. `limits` overrides constants of conveyor.domain.limits. `next_release` has the options
    in which a second release differs; each start of a process draws one of the two releases.
    `settle_max` overrides how many settles share one commit. `is_fault_free` means that engines,
    processes and clocks have no faults. `client_speed` divides the pauses of clients,
    `client_profile` names the actions that they prefer (profiles.py). `conditions` are the special
    conditions of the world. With `returns_after_expiry` clients return after results with a
    lifetime of a day have expired; some other worlds do this as well.
    """

    seed: int
    engine: str
    has_gateway: bool
    workers_count: int
    apis_count: int
    clients_count: int
    safety_s: float
    liveness_s: float
    disturb_s: float
    think_s: float
    latency_s: float
    concurrency: int
    shard_count: int
    at_once_max: int
    sync_tasks_max: int
    chunk_tasks: int
    page_rows: int
    max_inflight: int
    receive_max: int
    sweep_s: float
    poll_s: float
    offset_s: float
    drift: float
    step_s: float
    check_every: int
    has_redis: bool
    service_rates: FaultRates
    rates: dict[str, float]
    limits: dict[str, int | float] = {}
    next_release: dict[str, int] = {}
    settle_max: int | None = None
    is_fault_free: bool = False
    client_speed: float = 1.0
    client_profile: str = EVEN
    conditions: Conditions = Conditions()
    returns_after_expiry: bool = False

    @property
    def calls_max(self) -> int:
        """The number of engine calls after which the world counts as making no progress. Worlds
        with a longer phase with faults may make more."""
        return round(CALLS_MAX * max(1.0, self.safety_s / max(SAFETY_S)))

    @property
    def rate_of(self) -> dict[Fault, float]:
        return {Fault(name): rate for name, rate in self.rates.items()}


def draw(seed: int, *, engine: str | None = None, hours: float | None = None) -> Options:
    """Draws the options of a seed. `engine` and `hours` replace what was drawn."""
    random = Random(f"options {seed}")
    drawn = random.choice(ENGINES)
    chosen = engine or drawn
    drawn_s = random.choice(SAFETY_S)

    def buggified(usual: float, *odd: float) -> float:
        return random.choice(odd) if random.random() < 0.25 else usual

    options = Options(
        seed=seed,
        engine=chosen,
        has_gateway=random.random() < 0.3,
        workers_count=random.choice((1, 1, 2, 3)),
        apis_count=random.choice((1, 2)),
        clients_count=random.choice((1, 2, 3)),
        safety_s=drawn_s if hours is None else hours * 3600.0,
        liveness_s=2 * 3600.0,
        disturb_s=random.choice((30.0, 60.0, 120.0, 1e9)),
        think_s=random.choice((0.1, 1.0, 5.0)),
        latency_s=random.choice((0.0005, 0.005, 0.05)),
        concurrency=random.choice((2, 5, 50)),
        shard_count=int(buggified(4, 1, 2, 16)),
        at_once_max=int(buggified(20, 0, 1)),
        sync_tasks_max=random.choice((5, 30, 1000)),
        chunk_tasks=int(buggified(10, 1)),
        page_rows=int(buggified(50, 1, 3)),
        max_inflight=int(buggified(10, 1)),
        receive_max=int(buggified(20, 1)),
        # A sweep of an AWS engine is about a hundred calls: once a second, they would be most of
        # the trace.
        sweep_s=buggified(SWEEP_S, 5.0 if chosen in {"aws", "mixed"} else 1.0),
        poll_s=random.choice((5.0, 10.0, 20.0)),
        offset_s=random.choice((0.0, 0.0, 5.0)),
        drift=random.choice((0.0, 0.0, 200e-6)),
        step_s=random.choice((0.0, 0.0, 60.0)),
        check_every=random.choice((1, 3)),
        has_redis=random.random() < 0.6,
        # The name of a stream decides what it draws: another one would change every recorded world.
        service_rates=_draw_service_rates(Random(f"pessimism {seed}")),
        rates={fault.value: random.choice(rates) for fault, rates in _CHOICES.items()},
        next_release=_draw_release(Random(f"release {seed}")),
        settle_max=Random(f"settles {seed}").choice((None, None, None, 1)),
    )
    return with_conditions(with_profile(options))


def _draw_release(random: Random) -> dict[str, int]:
    """Draws how a second release differs; one world in four has one. These options must not matter
    to jobs that the other release began."""
    if random.random() >= 0.25:
        return {}
    return {
        "shard_count": random.choice((1, 2, 4, 16)),
        "at_once_max": random.choice((0, 1, 20)),
        "sync_tasks_max": random.choice((5, 30, 1000)),
        "chunk_tasks": random.choice((1, 10)),
        "receive_max": random.choice((1, 20)),
        "concurrency": random.choice((2, 5, 50)),
    }


def _draw_service_rates(random: Random) -> FaultRates:
    """Draws the fault rates of the AWS services. Half of them are 0."""

    def rate(most: float) -> float:
        return random.choice((0.0, 0.0, most / 4, most))

    tight = CapacityLimits(partition_writes=20.0, partition_reads=100.0)
    return FaultRates(
        calls=CallFaults(
            latency_s=(0.0, random.choice((0.001, 0.01, 0.1))),
            refused_rate=rate(0.1),
            lost_rate=rate(0.04),
            slow_rate=rate(0.01),
            stalled_rate=rate(0.002),
            late_rate=rate(0.005),
        ),
        dynamodb=DynamoFaults(
            capacity=random.choice((None, CapacityLimits(), tight)),
            throttled_shard_rate=rate(0.002),
            unprocessed_rate=rate(0.1),
            conflict_rate=rate(0.1),
            conflict_s=random.choice((0.0, 0.02)),
            in_progress_rate=rate(0.8),
            stale_read_rate=rate(0.3),
            late_index_rate=rate(0.2),
            late_expiry_rate=rate(0.5),
            never_expires_rate=rate(0.2),
            short_page_rate=rate(0.2),
        ),
        sqs=SqsFaults(
            duplicate_rate=rate(0.05),
            undead_rate=rate(0.05),
            reordered_rate=rate(0.5),
            false_empty_rate=rate(0.2),
            lost_receive_rate=rate(0.05),
            stale_receipt_rate=rate(0.3),
            visibility_drift=rate(0.1),
            unseen_rate=rate(0.3),
            ghost_rate=rate(0.3),
            in_flight_max=random.choice((10, 200, 120_000)),
            retention_s_max=random.choice((RETENTION_S, 14 * 86400.0)),
            partial_batch_rate=rate(0.05),
            garbage_rate=rate(0.05),
        ),
        s3=S3Faults(
            slow_down_rate=rate(0.05),
            slow_rate=rate(0.05),
            lost_put_rate=rate(0.05),
            truncated_list_rate=rate(0.3),
            undeleted_rate=rate(0.4),
            left_open_rate=rate(0.3),
            broken_read_rate=rate(0.2),
        ),
        redis=RedisFaults(
            down_rate=rate(0.002),
            failover_rate=rate(0.003),
            split_rate=rate(0.002),
            evicted_rate=rate(0.004),
            killed_rate=rate(0.01),
            slow_rate=rate(0.01),
            deaf_rate=rate(0.05),
        ),
    )
