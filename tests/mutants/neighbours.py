"""Probes of the protection against other callers, gateways, storage and clocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import trio

import actors.task_runner
from actors.limiters.fair_limiter import FairLimiter
from actors.limiters.storage_breaker import StorageBreaker
from conveyor.domain import timing
from conveyor.domain.backpressure.call_window import CallWindow
from conveyor.domain.backpressure.gateway_health import UNREACHABLE_TO_OPEN, GatewayHealth
from conveyor.domain.ids import CallerId
from conveyor.domain.model import Result, RunStatus, TaskStatus
from conveyor.domain.quota import Quota
from conveyor.usecases.context import Context
from conveyor.usecases.quota import StorageQuotas, Use
from conveyor.usecases.run import reconcile, run_progress
from conveyor.usecases.run.results import ResultExpiry
from tests.builders import RUN, a_task


async def a_gateway_that_is_away(env: Context) -> object:
    await trio.lowlevel.checkpoint()
    health = GatewayHealth()
    for _ in range(UNREACHABLE_TO_OPEN):
        health = health.note_unreachable(now=1.0, probe=None, random=Random(1))
    return health.circuit.is_closed


async def a_first_failure(env: Context) -> object:
    await trio.lowlevel.checkpoint()
    return GatewayHealth().note_failure(
        "target", "host", began_at=1.0, now=1.0, probe=None, random=Random(1)
    )[1]


async def a_full_window(env: Context) -> object:
    await trio.lowlevel.checkpoint()
    return CallWindow().room(1000, now=1.0)


async def a_held_page(env: Context) -> object:
    await trio.lowlevel.checkpoint()
    return StorageBreaker(Random(1)).hold(1)


async def a_crash(env: Context) -> object:
    async def crash() -> None:
        await trio.lowlevel.checkpoint()
        raise ZeroDivisionError

    isolate = vars(actors.task_runner)["isolate"]
    return type(await isolate(crash, "a task"))


async def a_used_up_quota(env: Context) -> object:
    await trio.lowlevel.checkpoint()
    quotas = StorageQuotas(env, {Quota.LIVE_RUNS: 1})
    return quotas._find_exceeded(Use(live_runs=1), [Quota.LIVE_RUNS]) is None


async def an_abandoned_call(env: Context) -> object:
    await run_progress.leave_abandoned(env, RUN, 2)
    return await run_progress.count_abandoned(env, RUN)


async def a_share_of_slots(env: Context) -> object:
    await trio.lowlevel.checkpoint()
    return FairLimiter(capacity=10).room_for(CallerId("us"))


async def a_claim_of_tomorrow(env: Context) -> object:
    await trio.lowlevel.checkpoint()
    return timing.is_unreal(86_400.0, now=0.0, ttl_s=50.0)


async def an_expired_result(env: Context) -> object:
    await trio.lowlevel.checkpoint()
    result = Result("body.1", 4, "digest", "text/html", 200)
    task = a_task(status=TaskStatus.SUCCESSFUL, result=result)
    return ResultExpiry(RUN, {RUN: 1.0}, 1e12, at=2.0).is_over(task)


async def a_sweep_of_expired(env: Context) -> object:
    run: Any = SimpleNamespace(
        job_id="job", run_id=RUN, expires_at=env.now(), sweep_at=None, status=RunStatus.COMPLETED
    )
    removed: Counter[str] = Counter()

    async def find(query: object) -> list[Any]:
        await trio.lowlevel.checkpoint()
        return [run]

    async def delete_prefix(prefix: str) -> int:
        await trio.lowlevel.checkpoint()
        removed[prefix] += 1
        return 0

    async def commit(change: object) -> None:
        await trio.lowlevel.checkpoint()

    around: Any = SimpleNamespace(
        now=env.now,
        config=env.config,
        store=SimpleNamespace(find=find),
        blobs=SimpleNamespace(delete_prefix=delete_prefix),
        commit=commit,
    )
    return await reconcile.sweep_expired(around)


NEIGHBOUR_PROBES: dict[str, Callable[[Context], Awaitable[object]]] = {
    "gateway_circuit_never_opens": a_gateway_that_is_away,
    "outage_counts_attempts": a_first_failure,
    "plan_ignored": a_full_window,
    "pages_not_held": a_held_page,
    "poison_not_isolated": a_crash,
    "quotas_not_judged": a_used_up_quota,
    "abandoned_calls_not_told": an_abandoned_call,
    "slots_without_shares": a_share_of_slots,
    "deadlines_of_a_wrong_clock_hold": a_claim_of_tomorrow,
    "expired_results_served": an_expired_result,
    "expired_bodies_stay": a_sweep_of_expired,
}
