"""Runs the dispatchers of one or several worker processes on one queue, and counts its deliveries.

A dispatcher is a real poller. The dispatchers of a process share its limiter, heartbeater, shard
writers and queue engine; the processes share the queue, the leases and the store. A `Link` lies
between a process and everything it shares: it adds latency, and it can be cut, as if the process
were killed.
"""

from __future__ import annotations

import inspect
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar, cast

import msgspec
import trio
from prometheus_client import CollectorRegistry

from actors.lease_heartbeater import LeaseHeartbeater
from actors.limiters.fair_limiter import FairLimiter
from actors.limiters.storage_breaker import StorageBreaker
from actors.messages import PollerMessage
from actors.poller.poller import RunPoller
from actors.runtime import Mailbox
from actors.shard_writer import ShardWriter
from actors.task_runner import TaskRunner
from actors.tree import LocalSignals, Mailboxes
from bench.late_leases import LateLeaseQueue, UncappedLeases
from conveyor.domain.budget import Price
from conveyor.domain.changes import RunKey
from conveyor.domain.ids import CallerId, JobId
from conveyor.domain.model import Run, Totals
from conveyor.domain.submit.admission import TaskDraft
from conveyor.domain.timing import IDLE_S_MIN, cooldown_s
from conveyor.engines.aws.client.client import Answer, AwsTransport, Params, RetryingAwsClient
from conveyor.engines.aws.errors import NoResponse
from conveyor.engines.aws.sqs import SqsQueue
from conveyor.engines.memory import MemoryEngine
from conveyor.engines.system import AesSecretBox
from conveyor.ports.clock import Clock
from conveyor.ports.coordinator import Coordinator
from conveyor.ports.gateway import Outcome, Scraped, ScrapeRequest
from conveyor.telemetry import make_metrics
from conveyor.usecases.context import Context, RuntimeConfig
from conveyor.usecases.lookup import totals_of
from conveyor.usecases.submit.jobs import Accepted, Submission, submit

PREFIX = "bench-"
P = TypeVar("P")


class Gate(Enum):
    """What a dispatcher checks before it receives a message."""

    OFF = "nothing: if the job was at its cap, it receives again at once"
    LOCAL = "the tasks of its own process: if the job was at its cap, it pauses"
    PERMITS = "a lease of the job, which it holds for each message, as the product does"


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration to measure. `killed_at` is the number of finished tasks at which one
    process is killed; 0 means that no process is killed."""

    name: str
    gate: Gate = Gate.PERMITS
    tasks: int = 500
    cap: int = 5
    processes: int = 1
    dispatchers: int = 50
    think_s: float = 0.05
    killed_at: int = 0


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an arm. `messages` counts the deliveries of the queue over all receives; `dead`
    counts the tasks that ended without a page; `lease_calls` counts acquires, where measured."""

    tasks: int
    done: int
    dead: int
    messages: int
    calls: int
    empty_calls: int
    seconds: float
    lease_calls: int = 0

    @property
    def amplification(self) -> float:
        """Receives per delivered message: deliveries that the queue made for each task."""
        return self.messages / self.tasks


@dataclass(slots=True)
class Tally:
    """Counts the messages of all receive calls."""

    messages: int = 0
    calls: int = 0
    empty_calls: int = 0

    def count(self, messages: int) -> None:
        self.messages += messages
        self.calls += 1
        self.empty_calls += not messages


@dataclass(slots=True)
class Link:
    """The connection of one process to everything that it shares with other processes. A call that
    meets a cut link never returns."""

    random: random.Random
    sqs_s: float = 0.0
    coordinator_s: float = 0.0
    is_cut: bool = False
    call_counts: Counter[str] = field(default_factory=Counter)

    async def wait_half_round_trip(self, seconds: float) -> None:
        """Waits for half of a round trip."""
        if self.is_cut:
            await trio.sleep_forever()
        if seconds:
            await trio.sleep(seconds * self.random.uniform(0.4, 0.6))

    def to(self, port: P, seconds: float = 0.0) -> P:
        """Returns the port as a process at the other end of the link sees it."""
        return cast("P", _RemotePort(port, self, seconds))


@dataclass(frozen=True, slots=True)
class CountingTransport:
    """A transport that reports the number of messages of each receive."""

    transport: AwsTransport
    count: Callable[[int], None]

    async def call(
        self, service: str, operation: str, params: Params, *, deadline_s: float
    ) -> Answer:
        answer = await self.transport.call(service, operation, params, deadline_s=deadline_s)
        if operation == "ReceiveMessage":
            self.count(len(answer.get("Messages", ())))
        return answer

    @asynccontextmanager
    async def open(
        self, service: str, operation: str, params: Params, *, deadline_s: float
    ) -> AsyncGenerator[Answer, None]:
        async with self.transport.open(service, operation, params, deadline_s=deadline_s) as answer:
            yield answer


@dataclass(frozen=True, slots=True)
class RemoteTransport:
    """A transport behind a link. SQS calls do not stream, so `open` does not wait for the link."""

    transport: AwsTransport
    link: Link

    async def call(
        self, service: str, operation: str, params: Params, *, deadline_s: float
    ) -> Answer:
        ends_at = trio.current_time() + deadline_s
        await self._wait_half_round_trip(ends_at, was_sent=False)
        answer = await self.transport.call(service, operation, params, deadline_s=deadline_s)
        await self._wait_half_round_trip(ends_at, was_sent=True)
        return answer

    def open(
        self, service: str, operation: str, params: Params, *, deadline_s: float
    ) -> AbstractAsyncContextManager[Answer]:
        return self.transport.open(service, operation, params, deadline_s=deadline_s)

    async def _wait_half_round_trip(self, ends_at: float, *, was_sent: bool) -> None:
        with trio.CancelScope(deadline=ends_at) as scope:
            await self.link.wait_half_round_trip(self.link.sqs_s)
        if scope.cancelled_caught:
            raise NoResponse("no answer before the deadline", was_sent=was_sent)


class _RemotePort:
    def __init__(self, port: object, link: Link, seconds: float) -> None:
        self._port = port
        self._link = link
        self._seconds = seconds

    def __getattr__(self, method: str) -> Any:
        target: Callable[..., Awaitable[Any]] = getattr(self._port, method)
        if not inspect.iscoroutinefunction(target):  # A method that does no I/O.
            return target

        async def call(*args: Any, **kwargs: Any) -> Any:
            self._link.call_counts[method] += 1
            await self._link.wait_half_round_trip(self._seconds)
            answer = await target(*args, **kwargs)
            await self._link.wait_half_round_trip(self._seconds)
            return answer

        return call


@dataclass(frozen=True, slots=True)
class ThinkingGateway:
    """Returns the same page for every URL, after `think_s`."""

    think_s: float

    def price(self, params: Mapping[str, str]) -> Price:
        return Price()

    async def scrape(self, request: ScrapeRequest) -> Outcome:
        await trio.sleep(self.think_s)
        return Scraped(status=200, content_type="text/html", body=b"<p>hello</p>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the processes of an arm share: a queue service, leases, and a store."""

    transport: AwsTransport
    coordinator: Coordinator
    memory: MemoryEngine
    clock: Clock
    random: random.Random
    tally: Tally = field(default_factory=Tally)

    def env(self, link: Link) -> Context:
        """Returns the ports of a process, each behind its link."""
        client = RetryingAwsClient(
            transport=RemoteTransport(CountingTransport(self.transport, self.tally.count), link),
            random=self.random,
        )
        mail = Mailboxes()
        return Context(
            store=link.to(self.memory.store),
            queue=SqsQueue(client=client, clock=self.clock, random=self.random, prefix=PREFIX),
            blobs=link.to(self.memory.blobs),
            coordinator=link.to(self.coordinator, link.coordinator_s),
            clock=self.clock,
            secret_box=AesSecretBox(bytes(32)),
            signals=LocalSignals(mail.discovery.address, mail.streamer.address),
            random=self.random,
            process_id="bench",
            config=RuntimeConfig(at_once_max=100_000),
        )

    async def submit(self, env: Context, arm: Arm) -> Accepted:
        """Submits the job to the memory engine, whose store sends refs only to its own queue, and
        moves the refs to SQS."""
        drafts = [TaskDraft(url=f"https://example.com/{number}") for number in range(arm.tasks)]
        accepted = await submit(
            env,
            CallerId("bench"),
            Submission(drafts=drafts, max_inflight=arm.cap),
            job_id=JobId(env.new_id()),
        )
        run_id = accepted.run.run_id
        sent = await self.memory.queue.receive(run_id, count_max=arm.tasks, visibility_s=0)
        await env.queue.open_run(run_id)
        await env.queue.send([message.ref for message in sent])
        return accepted


@dataclass(frozen=True, slots=True)
class Process:
    link: Link
    limiter: FairLimiter


def without_permits(env: Context, arm: Arm) -> Context:
    """Returns the context of a process whose dispatchers learn only after a receive that the job
    is at its cap."""

    def pause_s(refusals: int) -> float:
        return IDLE_S_MIN if arm.gate is Gate.OFF else cooldown_s(refusals, env.random)

    return replace(
        env,
        coordinator=UncappedLeases(env.coordinator),
        queue=LateLeaseQueue(env.queue, env.coordinator, cap=arm.cap, pause_s=pause_s),
    )


async def dispatch(env: Context, limiter: FairLimiter, arm: Arm, accepted: Accepted) -> None:
    """Runs the dispatchers of one process until they are cancelled or the run has ended."""
    job = accepted.job
    if arm.gate is not Gate.PERMITS:
        env = without_permits(env, arm)
    if arm.gate is Gate.OFF:
        # A poller compares its own tasks with the cap of its job, so this arm gets a cap that
        # no poller reaches.
        job = msgspec.structs.replace(job, max_inflight=arm.dispatchers)
    mail = Mailboxes()
    metrics, gateway = make_metrics(CollectorRegistry()), ThinkingGateway(arm.think_s)
    storage = StorageBreaker(env.random)
    runner = TaskRunner(
        env=env,
        gateway=gateway,
        heartbeater=mail.heartbeater.address,
        writers=[mailbox.address for mailbox in mail.writers],
        metrics=metrics,
        storage=storage,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(LeaseHeartbeater(env=env).run, mail.heartbeater.open_inbox())
        for mailbox in mail.writers:
            writer = ShardWriter(env=env, metrics=metrics)
            nursery.start_soon(writer.run, mailbox.open_inbox())
        for _ in range(arm.dispatchers):
            poller = RunPoller(
                env=env,
                job=job,
                run_at_start=accepted.run,
                limiter=limiter,
                run_task=runner.run,
                price=gateway.price,
                metrics=metrics,
                storage=storage,
            )
            news: Mailbox[PollerMessage] = Mailbox(capacity=10)
            nursery.start_soon(poller.run, news.open_inbox())


async def drain(
    shared: Shared, arm: Arm, make_link: Callable[[], Link], on_progress: Callable[[int], None]
) -> Drained:
    """Runs an arm to its end. Calls `on_progress` with the number of finished tasks."""
    processes = [
        Process(make_link(), FairLimiter(capacity=arm.dispatchers)) for _ in range(arm.processes)
    ]
    outside = shared.env(make_link())
    accepted = await shared.submit(outside, arm)
    started_at = trio.current_time()
    async with trio.open_nursery() as nursery:
        for process in processes:
            env = shared.env(process.link)
            nursery.start_soon(dispatch, env, process.limiter, arm, accepted)
        run = await _wait_for_end(outside, arm, accepted, processes, on_progress)
        seconds = trio.current_time() - started_at
        nursery.cancel_scope.cancel()
    ended = summarize_drain(arm, await totals_of(outside, run), shared.tally, seconds)
    lease_calls = sum(process.link.call_counts["acquire"] for process in processes)
    return msgspec.structs.replace(ended, lease_calls=lease_calls)


def summarize_drain(arm: Arm, totals: Totals, tally: Tally, seconds: float) -> Drained:
    return Drained(
        tasks=arm.tasks,
        done=totals.successful,
        dead=arm.tasks - totals.successful,
        messages=tally.messages,
        calls=tally.calls,
        empty_calls=tally.empty_calls,
        seconds=seconds,
    )


async def _wait_for_end(
    env: Context,
    arm: Arm,
    accepted: Accepted,
    processes: Sequence[Process],
    on_progress: Callable[[int], None],
) -> Run:
    """Returns the run when it has ended. Cuts the link of the busiest process at `killed_at`."""
    key = RunKey(accepted.job.job_id, accepted.run.run_id)
    is_to_kill = arm.killed_at > 0
    while True:
        run = await env.store.read(key)
        assert run is not None
        done = (await totals_of(env, run)).successful
        on_progress(done)
        if run.ended_at is not None:
            return run
        if is_to_kill and done >= arm.killed_at:
            max(processes, key=lambda process: process.limiter.inflight_count).link.is_cut = True
            is_to_kill = False
        await trio.sleep(0.05)
