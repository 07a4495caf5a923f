"""Mutants of the protection against others: breakers, quotas, slots, clocks, expiry."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from conveyor.domain.backpressure.gateway_health import GatewayHealth
from conveyor.domain.ids import CallerId, Random, RunId
from conveyor.domain.model import Task
from conveyor.domain.quota import Quota, QuotaExceeded
from conveyor.simulation.environment.conditions import DAY_S, SLOTS, TIGHT, Conditions
from conveyor.simulation.swaps import combine, swap
from conveyor.usecases.context import Context
from conveyor.usecases.quota import Use
from tests.mutants.mutant import Mutant


def _keep_closed(_: Any) -> Any:
    def mutated(
        health: GatewayHealth, probe: int | None, now: float, random: Random
    ) -> GatewayHealth:
        return health

    return mutated


def _count_every_failure(note_failure: Any) -> Any:
    def mutated(
        self: GatewayHealth,
        target: str,
        host: str,
        *,
        began_at: float,
        now: float,
        probe: int | None,
        random: Random,
    ) -> tuple[GatewayHealth, bool]:
        health, _ = note_failure(
            self, target, host, began_at=began_at, now=now, probe=probe, random=random
        )
        return health, True

    return mutated


def _ignore_limit(_: Any) -> Any:
    def mutated(self: Any, inflight: int, *, now: float) -> int:
        return 100

    return mutated


def _refuse_to_hold(_: Any) -> Any:
    def mutated(self: Any, size_bytes: int) -> bool:
        return False

    return mutated


def _note_nothing(_: Any) -> Any:
    def mutated(self: Any, error: BaseException, probe: int | None = None) -> None:
        return

    return mutated


def _call_directly(_: Any) -> Any:
    async def mutated(
        handle: Callable[[], Awaitable[Any]],
        what: str,
        *,
        expects: tuple[type[Exception], ...] = (),
        extra: Mapping[str, object] | None = None,
        level: int = logging.ERROR,
        logged: tuple[type[Exception], ...] = (),
    ) -> Any:
        return await handle()

    return mutated


def _find_none_exceeded(_: Any) -> Any:
    def mutated(self: Any, use: Use, quotas: Sequence[Quota]) -> QuotaExceeded | None:
        return None

    return mutated


def _count_none_abandoned(_: Any) -> Any:
    async def mutated(env: Context, run_id: RunId) -> int:
        return 0

    return mutated


def _give_all_free_slots(_: Any) -> Any:
    def mutated(self: Any, caller: CallerId) -> int:
        free: int = self._free
        return free

    return mutated


def _preempt_nothing(_: Any) -> Any:
    def mutated(self: Any) -> None:
        return

    return mutated


def _accept_every_deadline(_: Any) -> Any:
    def mutated(until: float, *, now: float, ttl_s: float) -> bool:
        return False

    return mutated


def _never_expired(_: Any) -> Any:
    def mutated(self: Any, task: Task) -> bool:
        return False

    return mutated


def _sweep_nothing(_: Any) -> Any:
    async def mutated(env: Context) -> int:
        return 0

    return mutated


# Without faults of our processes clients make fast progress, so a short time is enough.
_NO_FAULTS: dict[str, Any] = {"is_fault_free": True, "safety_s": 40.0, "clients_count": 2}
_WITH_GATEWAY: dict[str, Any] = {**_NO_FAULTS, "has_gateway": True}
_GATEWAY_OUTAGES = Conditions(gateway_outage_every_s=20.0, is_isolated=True)
_EXPIRING_RESULTS: dict[str, Any] = {
    **_NO_FAULTS,
    "returns_after_expiry": True,
    "client_speed": 10.0,
}

MUTANTS = (
    Mutant(
        name="gateway_circuit_never_opens",
        window=114,
        invariants=(60,),
        what="A worker keeps calling a gateway that is unavailable.",
        apply=swap("conveyor.domain.backpressure.gateway_health:_open", _keep_closed),
        world={
            **_WITH_GATEWAY,
            "conditions": _GATEWAY_OUTAGES,
            "client_speed": 10.0,
            "think_s": 0.1,
        },
    ),
    Mutant(
        name="outage_counts_attempts",
        window=115,
        invariants=(60,),
        what="A call that fails during an outage of the gateway counts as an attempt of its task.",
        apply=swap(
            "conveyor.domain.backpressure.gateway_health:GatewayHealth.note_failure",
            _count_every_failure,
        ),
        world={**_WITH_GATEWAY, "conditions": _GATEWAY_OUTAGES, "client_speed": 10.0},
    ),
    Mutant(
        name="plan_ignored",
        window=116,
        invariants=(59,),
        what="Calls begin beyond the limit that the gateway reports.",
        apply=swap("conveyor.domain.backpressure.call_window:CallWindow.room", _ignore_limit),
        world={
            **_WITH_GATEWAY,
            "conditions": Conditions(gateway_plan=1, is_isolated=True),
            "client_speed": 10.0,
            "workers_count": 1,
        },
    ),
    Mutant(
        name="pages_not_held",
        window=117,
        invariants=(51,),
        what="A page that cannot be stored is thrown away and fetched again.",
        apply=combine(
            swap("actors.limiters.storage_breaker:StorageBreaker.hold", _refuse_to_hold),
            swap("actors.limiters.storage_breaker:StorageBreaker.note_failure", _note_nothing),
        ),
        world={
            **_NO_FAULTS,
            "conditions": Conditions(storage_outage_every_s=10.0, is_isolated=True),
            "client_speed": 10.0,
        },
    ),
    Mutant(
        name="poison_not_isolated",
        window=118,
        invariants=(53,),
        what="A task that crashes its handler also crashes the other tasks of the worker.",
        apply=swap("actors.task_runner:isolate", _call_directly),
        world={**_NO_FAULTS, "conditions": Conditions(poisons=("task",), is_isolated=True)},
    ),
    Mutant(
        name="quotas_not_judged",
        window=119,
        invariants=(57,),
        what="A caller that has used up a quota is still served.",
        apply=swap("conveyor.usecases.quota:StorageQuotas._find_exceeded", _find_none_exceeded),
        world={
            "is_fault_free": True,
            "conditions": Conditions(hostile="over_quotas", quotas=TIGHT, is_isolated=True),
            "safety_s": 60.0,
        },
    ),
    Mutant(
        name="abandoned_calls_not_told",
        window=120,
        invariants=(58,),
        what="The response to a stop omits the calls that the gateway still completes.",
        apply=swap("conveyor.usecases.run.run_progress:count_abandoned", _count_none_abandoned),
        world={
            **_WITH_GATEWAY,
            "conditions": Conditions(is_isolated=True),
            "client_profile": "restless",
            "think_s": 5.0,
        },
    ),
    Mutant(
        name="slots_without_shares",
        window=121,
        invariants=(56,),
        what="One caller may use every slot for as long as its pages take.",
        apply=combine(
            swap("actors.limiters.fair_limiter:FairLimiter.room_for", _give_all_free_slots),
            swap("actors.limiters.fair_limiter:FairLimiter._preempt_for_waiters", _preempt_nothing),
        ),
        world={
            **_NO_FAULTS,
            "has_gateway": False,
            "conditions": Conditions(hostile="tar_pits", is_isolated=True),
            "concurrency": SLOTS,
            "workers_count": 1,
        },
    ),
    Mutant(
        name="deadlines_of_a_wrong_clock_hold",
        window=122,
        invariants=(61,),
        what="A claim made while the clock was a day ahead lasts for a day.",
        apply=swap("conveyor.domain.timing:is_unreal", _accept_every_deadline),
        world={
            "conditions": Conditions(clock_leap_s=DAY_S),
            "safety_s": 100.0,
            "disturb_s": 20.0,
            "rates": {"killed_before": 0.005, "killed_after": 0.005},
        },
    ),
    Mutant(
        name="expired_results_served",
        window=123,
        invariants=(64,),
        what="A result is served after its expiry while its body still exists.",
        apply=combine(
            swap("conveyor.usecases.run.results:ResultExpiry.is_over", _never_expired),
            swap("conveyor.usecases.run.reconcile:sweep_expired", _sweep_nothing),
        ),
        world=_EXPIRING_RESULTS,
    ),
    Mutant(
        name="expired_bodies_stay",
        window=123,
        invariants=(64,),
        what="The bodies of expired results are never removed.",
        apply=swap("conveyor.usecases.run.reconcile:sweep_expired", _sweep_nothing),
        world=_EXPIRING_RESULTS,
    ),
)
