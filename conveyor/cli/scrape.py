"""`conveyor scrape`: fetches a list of URLs into a folder, without a server or an account
(docs/operations.md, Roles)."""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

import click
import msgspec
from rich.console import Console
from rich.table import Table

from conveyor.cli.limit_options import LimitOptions, host_limits, limit_options
from conveyor.cli.local_run import (
    CALLER,
    RunSummary,
    find_resumable,
    running_worker,
    start_job,
    watch_run,
)
from conveyor.cli.progress import progress
from conveyor.cli.result_files import LIST_NAME, make_folder, write_results
from conveyor.cli.shutdown import run_command
from conveyor.cli.url_list import read_urls
from conveyor.config import Settings
from conveyor.domain import limits
from conveyor.domain.backpressure.budget import BudgetCap
from conveyor.domain.backpressure.host_limit import HostLimits
from conveyor.domain.submit.target import TargetPolicy
from conveyor.schemas.requests import cap_from, host_limits_from
from conveyor.telemetry import set_up_logging
from conveyor.usecases.budget import set_cap

EXIT_SOME_FAILED = 1
# A shorter list is finished before another process has started.
LONG_LIST = 2_000
# The default for many cores. A larger number is possible with --processes.
PROCESSES_MAX = 4
EXIT_INTERRUPTED = 130


class Summary(msgspec.Struct, frozen=True):
    """The last line of the output with --json."""

    job_id: str
    total: int
    successful: int
    failed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ScrapeJob:
    """The job that the options describe."""

    urls: list[str]
    folder: Path
    attempts: int
    as_json: bool
    processes: int = 1
    budget: BudgetCap | None = None
    host_limits: HostLimits | None = None


class Options(LimitOptions):
    """The options as click passes them."""

    output: Path
    concurrency: int
    attempts: int
    processes: int | None
    skip_invalid: bool
    as_json: bool


@click.command()
@click.argument("source", metavar="FILE")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("scraped"),
    show_default=True,
    help="Folder for the pages.",
)
@click.option(
    "-c",
    "--concurrency",
    type=click.IntRange(1, limits.MAX_INFLIGHT_MAX),
    default=limits.MAX_INFLIGHT,
    show_default=True,
    help="Pages in flight at once.",
)
@click.option(
    "--attempts",
    type=click.IntRange(1, limits.MAX_ATTEMPTS_MAX),
    default=limits.MAX_ATTEMPTS,
    show_default=True,
    help="Tries per page.",
)
@click.option(
    "--processes",
    type=click.IntRange(1, 16),
    help="Processes that fetch; by default one per core, up to 4, for a long list.",
)
@limit_options
@click.option("--skip-invalid", is_flag=True, help="Leave out lines that are no usable URL.")
@click.option("--json", "as_json", is_flag=True, help="End with one line of JSON.")
@click.pass_obj
def scrape(settings: Settings, source: str, **options: Unpack[Options]) -> None:
    """Scrape the URLs in FILE (one per line; - for standard input) into a folder.

    After Ctrl-C or a crash, the same command continues where it stopped.
    """
    targets = TargetPolicy(allow_private=settings.allow_private_targets)
    urls = read_urls(source, targets, skip_invalid=options["skip_invalid"])
    concurrency = options["concurrency"]
    settings = replace(settings, concurrency=concurrency, max_inflight=concurrency)
    processes = options["processes"] or useful_processes(len(urls))
    budget, gentleness = options["budget"], host_limits(options["per_host"], options["rate"])
    order = ScrapeJob(
        urls,
        options["output"],
        options["attempts"],
        options["as_json"],
        processes,
        cap_from(budget) if budget else None,
        host_limits_from(gentleness),
    )
    sys.exit(run_order(settings, order, role="scrape"))


def useful_processes(urls_count: int) -> int:
    """Returns one process per core, up to PROCESSES_MAX, or one process for a short list."""
    return 1 if urls_count < LONG_LIST else min(os.cpu_count() or 1, PROCESSES_MAX)


def run_order(settings: Settings, order: ScrapeJob, *, role: str) -> int:
    """Runs the job and prints the result. Returns the exit code."""
    console = Console(stderr=True)
    set_up_logging("text", level=logging.WARNING)  # Warnings explain why the work waits.
    make_folder(order.folder)
    started_at = time.monotonic()
    ended = run_command(_do, settings, order, role, console)
    return report(ended, order, time.monotonic() - started_at, console)


async def _do(settings: Settings, order: ScrapeJob, role: str, console: Console) -> RunSummary:
    async with running_worker(settings, role=role, processes=order.processes) as world:
        begun = await find_resumable(world.env, order.urls)
        if begun is not None:
            console.print("Going on with this list where it stopped.")
        if begun is not None and order.budget is not None:
            await set_cap(world.env, CALLER, begun[0].job_id, order.budget)
        job, run = begun or await start_job(
            world.env,
            order.urls,
            concurrency=settings.concurrency,
            attempts=order.attempts,
            budget=order.budget,
            host_limits=order.host_limits,
        )
        price = world.gateway.price(job.params)
        with progress(console, "Scraping", len(order.urls)) as show:
            ended = await watch_run(world.env, job, run, show, price=price)
        if not ended.was_cut_off:
            await write_results(world.env, ended.run, order.folder)
    return ended


def report(ended: RunSummary, order: ScrapeJob, seconds: float, console: Console) -> int:
    totals = ended.totals
    if ended.was_cut_off:
        console.print(
            f"Interrupted with {totals.done:,} of {ended.run.planned:,} pages done. "
            "The same command goes on from there."
        )
        return EXIT_INTERRUPTED
    if ended.is_broke:
        console.print(
            f"The budget is spent with {totals.done:,} of {ended.run.planned:,} pages done. "
            "The same command with a larger --budget goes on from there."
        )
    console.print(_table(ended, seconds))
    console.print(f"Pages and {LIST_NAME} are in {order.folder}/", highlight=False)
    if order.as_json:
        summary = Summary(
            ended.job.job_id,
            ended.run.planned,
            totals.successful,
            totals.failed,
            round(seconds, 3),
        )
        click.echo(msgspec.json.encode(summary).decode())
    return EXIT_SOME_FAILED if totals.failed or ended.is_broke else 0


def _table(ended: RunSummary, seconds: float) -> Table:
    totals = ended.totals
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("pages", f"{ended.run.planned:,}", f"{ended.done_here / seconds:,.0f} a second")
    table.add_row("successful", f"[green]{totals.successful:,}", "")
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(totals.reasons.items()))
    table.add_row("failed", f"[red]{totals.failed:,}" if totals.failed else "0", reasons)
    table.add_row("seconds", f"{seconds:,.1f}", "")
    return table
