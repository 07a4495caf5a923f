"""A worker in virtual time: the memory engine, a scripted gateway, and the real actors."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import trio
from prometheus_client import CollectorRegistry

from actors.limiters.fair_limiter import FairLimiter
from actors.runtime import Supervisor, tree
from actors.tree import LocalSignals, Mailboxes, worker_tree
from conveyor.domain.budget import Price
from conveyor.domain.changes import RunKey
from conveyor.domain.errors import make_problem
from conveyor.domain.ids import CallerId, JobId, RunId
from conveyor.domain.model import FailureReason, Run, Task, Totals, Webhook
from conveyor.domain.queries import TasksOf
from conveyor.domain.submit.admission import TaskDraft
from conveyor.domain.submit.target import TargetPolicy
from conveyor.engines.memory import MemoryEngine, memory_engine
from conveyor.engines.system import AesSecretBox, VirtualClock
from conveyor.ports.clock import Clock
from conveyor.ports.coordinator import TeardownResult
from conveyor.ports.gateway import NotScraped, Outcome, Scraped, ScrapeRequest
from conveyor.ports.webhook_sender import Delivered, Message, NotDelivered
from conveyor.telemetry import Metrics, make_metrics
from conveyor.usecases.context import Context, RuntimeConfig
from conveyor.usecases.lookup import totals_of
from conveyor.usecases.run.rerun import Rerun
from conveyor.usecases.submit.jobs import Accepted, Submission, submit

CALLER = CallerId("a caller")

Script = Callable[[ScrapeRequest, int], Outcome]


def a_page(body: bytes = b"<p>hello</p>") -> Scraped:
    return Scraped(status=200, content_type="text/html", body=body)


def a_miss(
    reason: FailureReason = FailureReason.GATEWAY_ERROR, *, retryable: bool = True
) -> NotScraped:
    problem = make_problem("target_error", "The site failed", 503)
    return NotScraped(reason=reason, problem=problem, retryable=retryable)


@dataclass(slots=True)
class ScriptedGateway:
    """A gateway that answers by script after some think time, and counts the calls."""

    script: Script = lambda request, attempt: a_page()
    think_s: float = 0.1
    calls: Counter[str] = field(default_factory=Counter)
    inflight_count: int = 0
    inflight_max: int = 0
    prices: Price = field(default_factory=Price)
    dear_param: tuple[str, Price] = ("", Price())

    def price(self, params: Mapping[str, str]) -> Price:
        dear_param, dear_price = self.dear_param
        return dear_price if dear_param in params else self.prices

    async def scrape(self, request: ScrapeRequest) -> Outcome:
        self.calls[request.url] += 1
        attempt = self.calls[request.url]
        self.inflight_count += 1
        self.inflight_max = max(self.inflight_max, self.inflight_count)
        try:
            await trio.sleep(self.think_s)
        finally:
            self.inflight_count -= 1
        return self.script(request, attempt)


@dataclass(slots=True)
class RecordingNotifier:
    """A receiver that is down for its first `failures` deliveries."""

    failures: int = 0
    tried: list[Message] = field(default_factory=list)

    async def resolve(self, webhook: Webhook, partition: str) -> None:
        return None

    async def deliver(self, message: Message) -> Delivered | NotDelivered:
        self.tried.append(message)
        if len(self.tried) <= self.failures:
            return NotDelivered("http_5xx:500", status=500)
        return Delivered(204)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    env: Context
    engine: MemoryEngine
    mail: Mailboxes
    gateway: ScriptedGateway
    notifier: RecordingNotifier
    limiter: FairLimiter
    metrics: Metrics

    def supervisor(self) -> Supervisor:
        return worker_tree(
            self.env,
            self.mail,
            gateway=self.gateway,
            notifier=self.notifier,
            limiter=self.limiter,
            metrics=self.metrics,
        )

    @asynccontextmanager
    async def working(self) -> AsyncGenerator[Supervisor, None]:
        supervisor = self.supervisor()
        async with trio.open_nursery() as nursery:
            await nursery.start(supervisor.run)
            yield supervisor
            nursery.cancel_scope.cancel()

    async def submit(
        self, urls: Sequence[str], *, caller: CallerId = CALLER, **fields: Any
    ) -> Accepted:
        request = Submission(drafts=[TaskDraft(url=url) for url in urls], **fields)
        return await submit(self.env, caller, request, job_id=JobId(self.env.new_id()))

    async def run_of(self, accepted: Accepted | Rerun) -> Run:
        key = RunKey(accepted.job.job_id, accepted.run.run_id)
        run = await self.env.store.read(key)
        assert run is not None
        return run

    async def wait_for_end(
        self, accepted: Accepted | Rerun, *, within_s: float = 600.0
    ) -> tuple[Run, Totals]:
        """Waits in virtual time until the run has ended, and returns it."""
        with trio.fail_after(within_s):
            while (run := await self.run_of(accepted)).ended_at is None:
                await trio.sleep(0.1)
        return run, await totals_of(self.env, run)

    def pollers(self, supervisor: Supervisor) -> list[str]:
        (runs,) = [child for child in tree(supervisor).children if child.name == "runs"]
        return [child.name for child in runs.children]

    async def tasks(self, accepted: Accepted | Rerun) -> list[Task]:
        run = accepted.run
        query = TasksOf(
            job_id=run.job_id, run_id=run.run_id, shard_count=run.shard_count, limit=10_000
        )
        return await self.env.store.find(query)


class NoSignals:
    """Signals that never reach the worker."""

    async def run_changed(self, job_id: JobId, run_id: RunId, tasks: int = 0) -> None:
        await trio.lowlevel.checkpoint()

    async def batch_opened(self, job_id: JobId, run_id: RunId) -> None:
        await trio.lowlevel.checkpoint()

    async def teardown(self, job_id: JobId, run_id: RunId, *, deadline_s: float) -> TeardownResult:
        await trio.lowlevel.checkpoint()
        return TeardownResult(complete=False)


def without_signals(world: World) -> World:
    return replace(world, env=replace(world.env, signals=NoSignals()))


@dataclass(slots=True)
class SetClock:
    """Virtual time whose wall clock can be set by a test."""

    epoch_s: float = 1_700_000_000.0
    offset_s: float = 0.0

    def now(self) -> float:
        return self.epoch_s + trio.current_time() + self.offset_s

    def steady(self) -> float:
        return self.epoch_s + trio.current_time()


def make_world(
    *,
    capacity: int = 50,
    script: Script | None = None,
    think_s: float = 0.1,
    clock: Clock | None = None,
) -> World:
    clock = clock or VirtualClock(1_700_000_000.0)
    randomness = random.Random(1)
    engine = memory_engine(clock=clock, random=randomness)
    mail = Mailboxes()
    gateway = ScriptedGateway(think_s=think_s)
    if script is not None:
        gateway = replace(gateway, script=script)
    env = Context(
        store=engine.store,
        queue=engine.queue,
        blobs=engine.blobs,
        coordinator=engine.coordinator,
        clock=clock,
        secret_box=AesSecretBox(bytes(32)),
        signals=LocalSignals(mail.discovery.address, mail.streamer.address),
        random=randomness,
        process_id="tests",
        config=RuntimeConfig(targets=TargetPolicy()),
    )
    return World(
        env=env,
        engine=engine,
        mail=mail,
        gateway=gateway,
        notifier=RecordingNotifier(),
        limiter=FairLimiter(capacity=capacity),
        metrics=make_metrics(CollectorRegistry()),
    )


def urls(count: int, host: str = "example.com") -> list[str]:
    return [f"https://{host}/{number}" for number in range(count)]
