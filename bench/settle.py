"""Measures how many tasks a second the embedded engine settles, compared with bare SQLite.

Every arm updates the same number of tasks and counts each one in the same transaction, durably.
The bare arms do nothing else. Conveyor's arms also check the claim and the status of the run, and
return the rows.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import trio
from prometheus_client import CollectorRegistry

from actors.messages import Settle, ShardWriterMessage
from actors.runtime import Mailbox, Reply
from actors.shard_writer import ShardWriter
from actors.tree import LocalSignals, Mailboxes
from bench.sqlite_baseline import bare_database, insert_run, settle
from conveyor.domain.ids import CallerId, JobId
from conveyor.domain.model import Result, Task, TaskRef
from conveyor.domain.queries import TasksOf
from conveyor.domain.run import settlement
from conveyor.domain.run.settlement import Claimed, Cost, Settled, SettleVerdict
from conveyor.domain.submit.admission import TaskDraft, make_ref
from conveyor.engines.sqlite import EmbeddedEngine, open_engine
from conveyor.engines.system import AesSecretBox, SystemClock
from conveyor.telemetry import make_metrics
from conveyor.usecases.context import Context
from conveyor.usecases.submit import jobs

RESULT = Result("jobs/x/runs/y/z/1", 20_000, "0" * 64, "text/html", 200)
Pair = tuple[TaskRef, Task]


class Arm(msgspec.Struct, frozen=True):
    name: str
    per_second: float
    cpu_us: float


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench settle", description=__doc__)
    parser.add_argument("--n", type=int, default=9_000, help="tasks per arm")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as folder:
        arms = _bare_arms(Path(folder), options.n)
        arms += trio.run(_conveyor_arms, Path(folder), options.n)
    _show(arms)
    if options.json:
        print(msgspec.json.encode({arm.name: round(arm.per_second) for arm in arms}).decode())


def _measure(name: str, count: int, work: Callable[[], object]) -> Arm:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return _arm(name, count, wall, cpu)


def _arm(name: str, count: int, wall: float, cpu: float) -> Arm:
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    return Arm(name, count / seconds, cpu_seconds / count * 1e6)


def _bare_arms(folder: Path, count: int) -> list[Arm]:
    ids = [f"{number:032x}" for number in range(count)]
    arms = []
    with bare_database(folder / "bare.db") as connection:
        for name, group in (("bare, one a commit", 1), ("bare, 90 a commit", 90)):
            insert_run(connection, name, ids)
            arms.append(_measure(name, count, partial(settle, connection, name, ids, group)))
    return arms


async def _conveyor_arms(folder: Path, count: int) -> list[Arm]:
    clock, randomness = SystemClock(), random.Random(1)
    async with open_engine(
        folder / "data", clock=clock, random=randomness, owner="bench"
    ) as engine:
        env = _env(engine, clock, randomness)
        arms = []
        for name, run in (
            ("conveyor, 64 waiting", _settle_each),
            ("conveyor, shard writer", _settle_through_writer),
        ):
            claimed = await _claim_tasks(env, count)
            wall, cpu = time.perf_counter(), time.process_time()
            await run(env, claimed)
            arms.append(_arm(name, count, wall, cpu))
        return arms


def _env(engine: EmbeddedEngine, clock: SystemClock, randomness: random.Random) -> Context:
    mail = Mailboxes()
    return Context(
        store=engine.store,
        queue=engine.queue,
        blobs=engine.blobs,
        coordinator=engine.coordinator,
        clock=clock,
        secret_box=AesSecretBox(bytes(32)),
        signals=LocalSignals(mail.discovery.address, mail.streamer.address),
        random=randomness,
        process_id="bench",
    )


async def _claim_tasks(env: Context, count: int) -> list[Pair]:
    """Submits a run of `count` tasks and claims all of them."""
    drafts = [TaskDraft(url=f"https://example.com/{number}") for number in range(count)]
    accepted = await jobs.submit(
        env, CallerId("bench"), jobs.Submission(drafts=drafts), job_id=JobId(env.new_id())
    )
    run = accepted.run
    query = TasksOf(job_id=run.job_id, run_id=run.run_id, shard_count=run.shard_count, limit=count)
    claimed: list[Pair] = []
    refs = [make_ref(run, row) for row in await env.store.find(query)]
    for start in range(0, count, 500):
        now = env.now()
        group = refs[start : start + 500]
        verdicts = await env.store.commit([settlement.claim(ref, now=now) for ref in group])
        for ref, verdict in zip(group, verdicts, strict=True):
            claim = settlement.claim_result(verdict, now=now)
            assert isinstance(claim, Claimed)
            claimed.append((ref, claim.task))
    return claimed


async def _settle_each(env: Context, claimed: Sequence[Pair]) -> None:
    """Settles 64 tasks at a time with one commit each; the engine groups the commits."""

    async def one(ref: TaskRef, task: Task) -> None:
        change = settlement.succeed(ref, task, RESULT, spent=Cost(), now=env.now())
        verdict = settlement.settle_result(await env.commit(change), task)
        assert isinstance(verdict, Settled)

    await _in_parallel(claimed, one)


async def _settle_through_writer(env: Context, claimed: Sequence[Pair]) -> None:
    """Settles as the product does: 200 task runners send to one shard writer."""
    mailbox: Mailbox[ShardWriterMessage] = Mailbox(capacity=1_000)
    writer = ShardWriter(env=env, metrics=make_metrics(CollectorRegistry()))

    async def one(ref: TaskRef, task: Task) -> None:
        change = settlement.succeed(ref, task, RESULT, spent=Cost(), now=env.now())

        def make(reply: Reply[SettleVerdict]) -> Settle:
            return Settle(ref, task, change, None, reply)

        verdict: SettleVerdict = await mailbox.address.ask(make, deadline_s=30)
        assert isinstance(verdict, Settled)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run, mailbox.open_inbox())
        await _in_parallel(claimed, one, workers=200)
        nursery.cancel_scope.cancel()


async def _in_parallel(
    pairs: Sequence[Pair], one: Callable[[TaskRef, Task], Awaitable[None]], workers: int = 64
) -> None:
    waiting = iter(pairs)

    async def work() -> None:
        for ref, task in waiting:
            await one(ref, task)

    async with trio.open_nursery() as nursery:
        for _ in range(workers):
            nursery.start_soon(work)


def _show(arms: Sequence[Arm]) -> None:
    single, grouped = arms[0].per_second, arms[1].per_second
    print(f"{'':26}{'tasks/s':>10}{'CPU us':>9}{'to bare':>9}{'to grouped':>12}")
    for arm in arms:
        print(
            f"{arm.name:26}{arm.per_second:>10,.0f}{arm.cpu_us:>9.0f}"
            f"{arm.per_second / single:>8.2f}x{arm.per_second / grouped:>11.2f}x"
        )
