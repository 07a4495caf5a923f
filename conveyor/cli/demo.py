"""`conveyor demo`: a real job of a thousand pages against a site of our own
(docs/operations.md, Roles)."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from conveyor.cli.demo_site import is_flaky, is_missing, is_slow, running_site
from conveyor.cli.local import Ended, see_through, start_job, working
from conveyor.cli.progress import progress
from conveyor.cli.results import make_folder, write_results
from conveyor.cli.scrape import Order, report
from conveyor.cli.signals import run_command
from conveyor.config import Settings
from conveyor.domain import limits
from conveyor.telemetry import set_up_logging

CONCURRENCY = 50


@click.command()
@click.option("--pages", type=click.IntRange(1, 100_000), default=1_000, show_default=True)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("demo-results"),
    show_default=True,
    help="Folder for the pages.",
)
@click.option("--json", "as_json", is_flag=True, help="End with one line of JSON.")
@click.pass_obj
def demo(settings: Settings, pages: int, output: Path, as_json: bool) -> None:
    """Scrape a bundled local site: some pages slow, some flaky, some missing."""
    console = Console(stderr=True)
    set_up_logging("text", level=logging.WARNING)
    numbers = range(pages)
    missing = sum(map(is_missing, numbers))
    console.print(
        f"A site on this machine has {pages:,} pages: {sum(map(is_slow, numbers))} are slow, "
        f"{sum(map(is_flaky, numbers))} fail at first, {missing} are missing.\n"
        "In another terminal, `conveyor ps` shows what runs."
    )
    settings = replace(
        settings, allow_private_targets=True, concurrency=CONCURRENCY, max_inflight=CONCURRENCY
    )
    make_folder(output)
    started_at = time.monotonic()
    ended = run_command(_do, settings, pages, output, console)
    order = Order([], output, limits.MAX_ATTEMPTS, as_json)
    code = report(ended, order, time.monotonic() - started_at, console)
    if not ended.was_cut_off and ended.totals.failed != missing:
        raise click.ClickException(f"{missing} pages are missing, {ended.totals.failed} failed.")
    sys.exit(code if ended.was_cut_off else 0)


async def _do(settings: Settings, pages: int, output: Path, console: Console) -> Ended:
    async with running_site() as site, working(settings, role="demo") as world:
        job, run = await start_job(
            world.env,
            site.urls(pages),
            concurrency=CONCURRENCY,
            attempts=limits.MAX_ATTEMPTS,
        )
        with progress(console, "Scraping", pages) as show:
            ended = await see_through(world.env, job, run, show)
        if not ended.was_cut_off:
            await write_results(world.env, ended.run, output)
    return ended
