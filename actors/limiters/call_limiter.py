"""CallLimiter: how many calls each API key has in progress at a remote gateway
(docs/engines.md, Gateways).

Owns:    an ApiKeyLimiter for each key, and the leases by which all processes together keep to the
         limit that the gateway states.
Hears:   nothing: pollers take permits before they receive, and task runners report each outcome.
Says:    nothing; it publishes the stated limits as status texts, for processes that start later.
Crashes: only by bug. Leases age out, and windows start small again.

A key is named by the id of its caller, which is a keyed hash of the key. The key itself is never
part of a name.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

import trio

from actors.limiters.api_key_limiter import ApiKeyLimiter, CallPermit
from conveyor.domain import limits
from conveyor.domain.ids import RunId
from conveyor.domain.model import Job
from conveyor.domain.run.wait_reason import WaitReason
from conveyor.ports.errors import Unavailable
from conveyor.telemetry import Metrics
from conveyor.usecases.context import Context
from conveyor.usecases.run import run_progress

log = logging.getLogger(__name__)

# How long a key without calls keeps its learned window and health. A longer time keeps more keys in
# memory; after a shorter one, more jobs start with a small window.
IDLE_S = 600.0
SHARED_KEY = "shared"
# How often waiters are checked although no call has ended. Room also appears by time alone: when a
# pause, an outage or an abandoned call ends.
TICK_S = 0.25
# Longer than any lease of a call can live, so that a process which finds such leases also finds the
# limit.
STATUS_S = limits.SCRAPE_DEADLINE_S + 2 * limits.LEASE_TTL_S
# How often unused leases are released and changed limits are published.
RETURN_S = 1.0


class CallLimiter:
    """The limiters of all keys with which this process makes calls."""

    def __init__(self, env: Context, metrics: Metrics) -> None:
        self._env = env
        self._metrics = metrics
        self._limiters: dict[str, ApiKeyLimiter] = {}
        self._has_limiters = trio.Event()
        metrics.gateway.calls.set_function(
            lambda: sum(limiter.inflight_count for limiter in self._limiters.values())
        )
        metrics.gateway.calls_abandoned.set_function(
            lambda: sum(len(limiter.abandoned) for limiter in self._limiters.values())
        )
        metrics.gateway.circuits_open.set_function(
            lambda: sum(
                not health.circuit.is_closed
                for limiter in self._limiters.values()
                for health in limiter.healths.values()
            )
        )

    def limiter_for(self, job: Job) -> ApiKeyLimiter:
        """Returns the limiter of the key with which the job's calls are made: the caller's key, or
        the key in the gateway's URL, which all callers share."""
        is_own = job.auth_sealed is not None and not self._env.config.has_gateway_key
        name = job.caller if is_own else SHARED_KEY
        limiter = self._limiters.get(name)
        if limiter is None:
            limiter = self._limiters[name] = ApiKeyLimiter(self._env, self._metrics, name)
            self._has_limiters.set()
        return limiter

    def is_open(self, job: Job) -> bool:
        return self.limiter_for(job).is_open(job.caller)

    def reason_for(self, job: Job) -> WaitReason:
        return self.limiter_for(job).reason_for(job.caller)

    async def acquire(self, job: Job, run_id: RunId, *, count_max: int) -> list[CallPermit]:
        """Takes permits that are available at once; none while the gateway or its limit allows no
        call."""
        limiter = self.limiter_for(job)
        permits = limiter.take_nowait(job.caller, run_id, count_max=count_max)
        return await self._lease(limiter, permits)

    async def wait(self, job: Job, run_id: RunId, *, count_max: int) -> list[CallPermit]:
        """Waits until this process may have a permit, then takes up to `count_max`. Returns none if
        other processes hold all leases."""
        limiter = self.limiter_for(job)
        permits = await limiter.acquire(job.caller, run_id, weight=job.priority)
        permits += limiter.take_nowait(job.caller, run_id, count_max=count_max - len(permits))
        return await self._lease(limiter, permits)

    async def keep_abandoned(self, job: Job, run_id: RunId) -> None:
        """Keeps the interrupted calls of the run counted until their deadlines, and publishes their
        number for the receipt of a stop."""
        limiter = self.limiter_for(job)
        count = await limiter.keep_abandoned(run_id)
        await self._publish_limits([limiter])
        if count:
            await run_progress.leave_abandoned(self._env, run_id, count)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tick_forever)
            nursery.start_soon(self._maintain_forever)

    async def _lease(self, limiter: ApiKeyLimiter, permits: list[CallPermit]) -> list[CallPermit]:
        if not permits:
            return []
        try:
            if not limiter.window.is_answered:
                # Then the first answer of the gateway states the limit.
                with suppress(Unavailable):
                    limiter.adopt_limit(
                        await self._env.coordinator.list_status(_status_subject(limiter))
                    )
        # The permits belong to no poller yet, so a cancellation here must return them.
        except BaseException:
            for permit in permits:
                permit.close()
            raise
        return await limiter.lease(permits)

    async def _tick_forever(self) -> None:
        while True:
            await self._has_limiters.wait()
            await trio.sleep(TICK_S)
            for limiter in self._limiters.values():
                limiter.grant()

    async def _maintain_forever(self) -> None:
        # The first round renews at once: a restarted limiter may find leases that are old.
        renew_at = trio.current_time()
        while True:
            await self._has_limiters.wait()
            await trio.sleep(RETURN_S)
            try:
                await self._release_unused()
                await self._publish_limits(
                    [
                        limiter
                        for limiter in self._limiters.values()
                        if limiter.limit_text != limiter.published_limit
                    ]
                )
                if trio.current_time() >= renew_at:
                    renew_at = trio.current_time() + limits.HEARTBEAT_S
                    await self._renew()
            except Unavailable as error:
                log.warning("leases of gateway calls not renewed", extra={"cause": str(error)})
            self._forget_idle()

    async def _release_unused(self) -> None:
        unused = [
            lease_id for limiter in self._limiters.values() for lease_id in limiter.pop_unused()
        ]
        if unused:
            await self._env.coordinator.release(unused)

    async def _renew(self) -> None:
        limiters = list(self._limiters.values())
        leases = [lease_id for limiter in limiters for lease_id in limiter.live_leases()]
        if leases:
            lost = await self._env.coordinator.renew(leases, ttl_s=limits.LEASE_TTL_S)
            for limiter in limiters:
                # A call under a lost lease continues: it is already made, and interrupting it would
                # not stop the gateway.
                for lease_id in sorted(lost.intersection(limiter.leases)):
                    limiter.forget_lease(lease_id)
        for limiter in limiters:
            # Also here, for calls that were abandoned while their poller continues.
            await limiter.keep_leases_of_abandoned()
        await self._publish_limits([limiter for limiter in limiters if not limiter.is_idle])

    async def _publish_limits(self, limiters: Sequence[ApiKeyLimiter]) -> None:
        """Publishes the stated limits for other processes. They live longer than any lease, because
        a process that starts among leases of others must know the limit."""
        stated = {limiter: limiter.limit_text for limiter in limiters}
        texts = {
            _status_subject(limiter): text for limiter, text in stated.items() if text is not None
        }
        if texts:
            await self._env.coordinator.put_status(self._env.process_id, texts, ttl_s=STATUS_S)
        # After the call: what could not be published is published again.
        for limiter, text in stated.items():
            limiter.published_limit = text

    def _forget_idle(self) -> None:
        now = trio.current_time()
        for name, limiter in list(self._limiters.items()):
            # A limiter with permits, waiters or leases must stay, whatever its age.
            if limiter.is_idle and limiter.used_at + IDLE_S <= now:
                del self._limiters[name]
        if not self._limiters:
            self._has_limiters = trio.Event()


def _status_subject(limiter: ApiKeyLimiter) -> str:
    return f"limit-{limiter.pool}"
