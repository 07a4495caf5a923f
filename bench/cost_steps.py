"""Measures the AWS cost of a task by step, and compares it with the reference design.

Conveyor's worker drains a large job on servers that stand in for AWS, with a simulated site, and
its meter counts each call for a step. The cost of the reference design (reference_design.py) is
computed for the same job from its description. Bodies on S3 cost the same in both designs, so they
are shown but not part of the sums. A worker's periodic calls are shown per second.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import trio

from bench.cost_by_step import BACKGROUND, BENCH, STEPS, STORE_BODY, for_step, with_steps
from bench.local_run import start_run
from bench.reference_design import RECEIVES, Step, reference_steps
from bench.svg_chart import Panel, draw, figure_path, is_full_run
from conveyor.bootstrap.runtime import Runtime, create_resources, open_runtime
from conveyor.config import Settings
from conveyor.domain.budget import Price
from conveyor.domain.changes import RunKey, TaskKey
from conveyor.domain.lifecycle import RUN_LIVE
from conveyor.domain.model import Run
from conveyor.domain.queries import TasksOf
from conveyor.engines.aws.client import usage as prices
from conveyor.engines.aws.client.usage import Meter, Usage, item_bytes
from conveyor.engines.aws.dynamodb.items import to_item
from conveyor.ports.gateway import Outcome, Scraped, ScrapeRequest
from tests.servers import ACCESS_KEY, SECRET_KEY, a_ministack, a_redis

POLL_S = 0.5
BODY = b"<html>" + b"x" * 2_000


class Load(msgspec.Struct, frozen=True):
    """A job to drain: its length, its cap, and the time that a page takes."""

    count: int
    inflight: int
    page_s: float


class Sums(msgspec.Struct, frozen=True):
    """The cost of one task, without its body."""

    calls: float
    write_units: float
    read_units: float
    usd_per_million: float


class Arms(NamedTuple):
    """The reference design without its gate, the same with it (mean of its runs), and Conveyor."""

    ungated: Sums
    gated: Sums
    ours: Sums


class Measured(msgspec.Struct, frozen=True):
    load: Load
    steps: Mapping[str, Usage]
    seconds: float
    group_size: float
    row_bytes_max: int

    def sums(self) -> Sums:
        counted = [self.steps[name] for name in STEPS if name != STORE_BODY]
        return Sums(
            calls=self._per_task(call.calls for call in counted),
            write_units=self._per_task(call.write_units for call in counted),
            read_units=self._per_task(call.read_units for call in counted),
            usd_per_million=self._per_task(call.price_millionths for call in counted),
        )

    def _per_task(self, values: Iterable[float]) -> float:
        return sum(values) / self.load.count


class Site:
    """A gateway that returns the same page for every request, after `page_s` on average."""

    def __init__(self, page_s: float) -> None:
        self._page_s = page_s
        self._random = random.Random(1)

    def price(self, params: Mapping[str, str]) -> Price:
        return Price()

    async def scrape(self, request: ScrapeRequest) -> Outcome:
        await trio.sleep(self._page_s * self._random.uniform(0.5, 1.5))
        return Scraped(status=200, content_type="text/html; charset=utf-8", body=BODY)


@contextmanager
def running_aws_servers(folder: Path) -> Iterator[Settings]:
    """Runs servers that stand in for AWS and Redis, and yields settings that use them."""
    with a_ministack(folder / "aws") as url, a_redis(folder / "redis") as redis:
        os.environ.update(
            AWS_ENDPOINT_URL=url,
            AWS_ACCESS_KEY_ID=ACCESS_KEY,
            AWS_SECRET_ACCESS_KEY=SECRET_KEY,
            AWS_REGION="us-east-1",
            AWS_DEFAULT_REGION="us-east-1",
        )
        yield Settings(
            engine="aws",
            data_dir=folder / "data",
            table="cost",
            bucket="cost",
            queue_prefix="cost-",
            redis_url=redis,
            secret_key="of the bench",
            sync_tasks_max=100,  # A short list is already staged and sharded, as a large one is.
        )


async def measure(settings: Settings, load: Load) -> Measured:
    settings = replace(
        settings,
        max_inflight=load.inflight,
        concurrency=max(settings.concurrency, load.inflight),
    )
    await create_resources(settings)
    async with open_runtime(settings, role="worker") as opened, trio.open_nursery() as nursery:
        world = replace(opened, env=with_steps(opened.env), gateway=Site(load.page_s))
        assert isinstance(world.meter, Meter)
        await nursery.start(world.worker().run)
        began_at = trio.current_time()
        run = await _drain(world, load)
        seconds = trio.current_time() - began_at
        largest = await for_step(BENCH, partial(_largest_row, world, run))
        nursery.cancel_scope.cancel()
    return Measured(load, world.meter.steps, seconds, _group_size(world), largest)


async def _drain(world: Runtime, load: Load) -> Run:
    env = world.env
    urls = [f"https://example.com/a/page/somewhere?id={number}" for number in range(load.count)]
    submit = partial(start_run, env, urls, concurrency=load.inflight, attempts=3)
    run = await for_step("submit", submit)
    while run.status in RUN_LIVE:
        await trio.sleep(POLL_S)
        key = RunKey(run.job_id, run.run_id)
        seen = await for_step(BENCH, partial(env.store.read, key))
        assert seen is not None
        run = seen
    return run


async def _largest_row(world: Runtime, run: Run) -> int:
    """Returns the bytes of the largest of some task rows. The meter counts one write unit for
    each write, which is too low above 1,024 bytes."""
    query = TasksOf(job_id=run.job_id, run_id=run.run_id, shard_count=run.shard_count, limit=100)
    return max(
        item_bytes(to_item(TaskKey(run.job_id, run.run_id, task.task_id, task.shard), task))
        for task in await world.env.store.find(query)
    )


def _group_size(world: Runtime) -> float:
    sample = world.metrics.registry.get_sample_value
    count = sample("conveyor_group_size_count", {"kind": "settle"})
    total = sample("conveyor_group_size_sum", {"kind": "settle"})
    return (total or 0.0) / (count or 1.0)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench cost_steps", description=__doc__)
    parser.add_argument("--n", type=int, default=4_000, help="tasks")
    parser.add_argument("--inflight", type=int, default=100, help="the job's cap")
    parser.add_argument("--page-s", type=float, default=1.0, help="seconds that a page takes")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    load = Load(options.n, options.inflight, options.page_s)
    with (
        tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as folder,
        running_aws_servers(Path(folder).resolve()) as settings,
    ):
        measured = trio.run(measure, settings, load)
    reference, ungated = (
        reference_steps(inflight=load.inflight, page_s=load.page_s, receives=RECEIVES[name])
        for name in ("mean", "ungated")
    )
    arms = Arms(sums_of(ungated), sums_of(reference), measured.sums())
    show_reference(reference, load)
    show(measured)
    compare(measured.sums(), load)
    draw_all(figure_path("cost_steps", is_full_run=is_full_run(parser, options)), measured, arms)
    if options.json:
        print(msgspec.json.encode(_json_line(arms)).decode())


def sums_of(reference: Sequence[Step]) -> Sums:
    counted = [step for step in reference if not step.is_s3]
    return Sums(
        calls=sum(step.calls for step in counted),
        write_units=sum(step.write_units for step in counted),
        read_units=sum(step.read_units for step in counted),
        usd_per_million=sum(step.usd_per_million for step in counted),
    )


def _json_line(arms: Arms) -> dict[str, float]:
    ours = arms.ours
    return {
        "calls_per_task": round(ours.calls, 3),
        "write_units_per_task": round(ours.write_units, 3),
        "usd_per_million": round(ours.usd_per_million, 3),
        "seeds_usd_per_million": round(arms.gated.usd_per_million, 3),
        "ratio": round(arms.gated.usd_per_million / ours.usd_per_million, 2),
        "ratio_ungated": round(arms.ungated.usd_per_million / ours.usd_per_million, 2),
    }


def _row(name: str, sums: Sums, why: str = "") -> str:
    return (
        f"{name:16}{sums.calls:>8.3f}{sums.write_units:>9.3f}{sums.read_units:>9.3f}"
        f"{sums.usd_per_million:>9.3f}  {why}".rstrip()
    )


_HEAD = f"{'calls':>24}{'writes':>9}{'reads':>9}{'USD/1M':>9}"


def show_reference(reference: Sequence[Step], load: Load) -> None:
    print(
        f"Reference design, {load.inflight} in flight, pages of {load.page_s:g} s: a task\n{_HEAD}"
    )
    for step in reference:
        sums = Sums(step.calls, step.write_units, step.read_units, step.usd_per_million)
        print(_row(step.name, sums, step.why))
    print(_row("without bodies", sums_of(reference)))


def show(measured: Measured) -> None:
    load = measured.load
    print(
        f"\nConveyor, the same: {load.count:,} tasks, {load.count / measured.seconds:.0f} a second,"
        f" {measured.group_size:.0f} settled together, rows up to {measured.row_bytes_max} bytes\n"
        f"{_HEAD}"
    )
    for name in STEPS:
        print(_row(name, _of_one_task(measured.steps[name], load.count)))
    print(_row("without bodies", measured.sums()))
    standing = [measured.steps[name] for name in (BACKGROUND, "")]
    calls = sum(call.calls for call in standing) / measured.seconds
    usd = sum(call.price_millionths for call in standing) / 1e6 / measured.seconds
    print(f"A worker's polling adds {calls:.0f} calls a second, {usd * 3600:.4f} USD an hour.")
    print(f"Redis, with a replica, is {prices.REDIS_HOUR / 1e6:.3f} USD an hour, for all workers.")


def _of_one_task(usage: Usage, count: int) -> Sums:
    return Sums(
        usage.calls / count,
        usage.write_units / count,
        usage.read_units / count,
        usage.price_millionths / count,
    )


def compare(ours: Sums, load: Load) -> None:
    print("\nThe reference design compared with Conveyor, by its receives per message:")
    print(f"{'receives':>16}{'calls':>9}{'writes':>9}{'USD/1M':>9}{'ratio':>8}")
    for name, receives in RECEIVES.items():
        theirs = sums_of(
            reference_steps(inflight=load.inflight, page_s=load.page_s, receives=receives)
        )
        print(
            f"{name:8}{receives:>8}{theirs.calls / ours.calls:>8.1f}x"
            f"{theirs.write_units / ours.write_units:>8.1f}x{theirs.usd_per_million:>9.2f}"
            f"{theirs.usd_per_million / ours.usd_per_million:>7.2f}x"
        )


def draw_all(figure: Path, measured: Measured, arms: Arms) -> None:
    load = measured.load
    names = (
        "reference design, without its gate",
        "reference design, with its gate",
        "Conveyor",
    )
    totals = [
        Panel("calls a task", [(name, sums.calls) for name, sums in zip(names, arms, strict=True)]),
        Panel(
            "write units a task",
            [(name, sums.write_units) for name, sums in zip(names, arms, strict=True)],
        ),
        Panel(
            "list price of a million tasks",
            [(name, sums.usd_per_million) for name, sums in zip(names, arms, strict=True)],
            "USD",
        ),
    ]
    by_step = Panel(
        "Conveyor, by step",
        [
            (name, measured.steps[name].price_millionths / load.count)
            for name in STEPS
            if name != STORE_BODY
        ],
        "USD",
    )
    title = f"Cost on AWS without bodies: {load.inflight} in flight, pages of {load.page_s:g} s"
    draw(figure, title, [*totals, by_step])
