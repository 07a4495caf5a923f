"""CallLimiter: how many calls each API key has under way at a remote gateway
(docs/engines.md, Gateways).

Owns:    for each key a line of calls, and the leases by which all processes together keep to a
         limit that the gateway states.
Hears:   nothing: pollers take permits before they receive, and tell each call's outcome.
Says:    nothing; it leaves marks with the limits that it was told, for processes that start.
Crashes: only by bug. Leases age out, and windows start small again.

Keys are named by their callers, whose names are keyed hashes of the keys.
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

# How long a key that nothing is called with keeps what was learned about it.
IDLE_S = 600.0
SHARED_KEY = "shared"
# How often time alone may let a call begin: when a pause, an outage or an abandoned call ends.
TICK_S = 0.25
STATUS_S = limits.SCRAPE_DEADLINE_S + 2 * limits.LEASE_TTL_S
# How often leases that no call needs are given back.
RETURN_S = 1.0


class CallLimiter:
    """The lines of all keys that this process makes calls with."""

    def __init__(self, env: Context, metrics: Metrics) -> None:
        self._env = env
        self._metrics = metrics
        self._lines: dict[str, ApiKeyLimiter] = {}
        self._has_lines = trio.Event()
        metrics.gateway.calls.set_function(
            lambda: sum(line.inflight_count for line in self._lines.values())
        )
        metrics.gateway.calls_abandoned.set_function(
            lambda: sum(len(line.abandoned) for line in self._lines.values())
        )
        metrics.gateway.circuits_open.set_function(
            lambda: sum(
                not health.circuit.is_closed
                for line in self._lines.values()
                for health in line.healths.values()
            )
        )

    def line_of(self, job: Job) -> ApiKeyLimiter:
        """The line of the key that the job's calls are made with: its caller's, or the one in the
        gateway's URL, which all callers share."""
        is_own = job.auth_sealed is not None and not self._env.policy.has_gateway_key
        name = job.caller if is_own else SHARED_KEY
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = ApiKeyLimiter(self._env, self._metrics, name)
            self._has_lines.set()
        return line

    def is_open(self, job: Job) -> bool:
        return self.line_of(job).is_open(job.caller)

    def reason_for(self, job: Job) -> WaitReason:
        return self.line_of(job).reason_for(job.caller)

    async def acquire(self, job: Job, run_id: RunId, *, count_max: int) -> list[CallPermit]:
        """Permits that can be had at once; none where the gateway or its limit says no."""
        line = self.line_of(job)
        permits = line.take_nowait(job.caller, run_id, count_max=count_max)
        return await self._lease(line, permits)

    async def wait(self, job: Job, run_id: RunId, *, count_max: int) -> list[CallPermit]:
        """Permits as soon as this process may have one; none where other processes have them."""
        line = self.line_of(job)
        permits = await line.acquire(job.caller, run_id, weight=job.priority)
        permits += line.take_nowait(job.caller, run_id, count_max=count_max - len(permits))
        return await self._lease(line, permits)

    async def keep_abandoned(self, job: Job, run_id: RunId) -> None:
        """The run's calls that were cut off count until their deadlines, and whoever stopped the
        run can tell how many there are."""
        line = self.line_of(job)
        count = await line.keep_abandoned(run_id)
        await self._leave_marks([line])
        if count:
            await run_progress.leave_abandoned(self._env, run_id, count)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tick_forever)
            nursery.start_soon(self._keep_forever)

    async def _lease(self, line: ApiKeyLimiter, permits: list[CallPermit]) -> list[CallPermit]:
        if not permits:
            return []
        try:
            if not line.window.is_answered:
                with suppress(Unavailable):  # Then the gateway tells.
                    line.adopt(await self._env.coordinator.list_status(_subject(line)))
        except BaseException:
            for permit in permits:
                permit.close()
            raise
        return await line.lease(permits)

    async def _tick_forever(self) -> None:
        while True:
            await self._has_lines.wait()
            await trio.sleep(TICK_S)
            for line in self._lines.values():
                line.grant()

    async def _keep_forever(self) -> None:
        beat_at = trio.current_time()
        while True:
            await self._has_lines.wait()
            await trio.sleep(RETURN_S)
            try:
                await self._give_back_unused()
                await self._leave_marks(
                    [line for line in self._lines.values() if line.mark != line.marked]
                )
                if trio.current_time() >= beat_at:
                    beat_at = trio.current_time() + limits.HEARTBEAT_S
                    await self._beat()
            except Unavailable as error:
                log.warning("leases of gateway calls not renewed", extra={"cause": str(error)})
            self._forget_idle()

    async def _give_back_unused(self) -> None:
        unused = [each for line in self._lines.values() for each in line.take_unused()]
        if unused:
            await self._env.coordinator.release(unused)

    async def _beat(self) -> None:
        lines = list(self._lines.values())
        held = [lease_id for line in lines for lease_id in line.live_leases()]
        if held:
            lost = await self._env.coordinator.renew(held, ttl_s=limits.LEASE_TTL_S)
            for line in lines:
                for lease_id in sorted(lost.intersection(line.leases)):
                    line.lose(lease_id)
        for line in lines:
            await line.keep_leases_of_abandoned()
        await self._leave_marks([line for line in lines if not line.is_idle])

    async def _leave_marks(self, lines: Sequence[ApiKeyLimiter]) -> None:
        """Tells other processes the limits, for longer than any lease lives: who starts with leases
        of others about must know how many there may be."""
        marks = {line: line.mark for line in lines}
        texts = {_subject(line): mark for line, mark in marks.items() if mark is not None}
        if texts:
            await self._env.coordinator.put_status(self._env.process_id, texts, ttl_s=STATUS_S)
        for line, mark in marks.items():
            line.marked = mark

    def _forget_idle(self) -> None:
        now = trio.current_time()
        for name, line in list(self._lines.items()):
            if line.is_idle and line.used_at + IDLE_S <= now:
                del self._lines[name]
        if not self._lines:
            self._has_lines = trio.Event()


def _subject(line: ApiKeyLimiter) -> str:
    return f"limit-{line.pool}"
