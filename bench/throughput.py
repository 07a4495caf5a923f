"""Measures the CPU time of a durable page, compared with a loop that stores no state.

All arms fetch from one local origin, in turn, each alone in its own process: aiohttp on uvloop
writing body files, Conveyor end to end in one process and in two, and httpx on Trio. The speed of a
shared machine changes, so a ratio is taken within a round, and the median of the rounds is shown.

With `--engine postgres` Conveyor runs on a PostgreSQL server with durable commits, whose CPU time
is shown separately. There, two processes share the concurrency, and one already uses a machine of
two cores fully. So that engine has a second comparison in which only the slots are the limit: a
slow site, and a second process with as many slots as the first.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec

from bench import postgres_variants
from bench.origin import running_origin
from bench.svg_chart import Panel, draw, figure_path, is_full_run
from bench.throughput_variants import Measured
from tests.servers import DURABLE, a_postgres

SLOW_S = 0.5
# The slow site gets a fourth of the pages, as each takes ten times as long.
SLOW_SHARE = 4
# httpx is so slow that a twentieth of the list gives the same precision.
HTTPX_SHARE = 20
NAMES = {
    "bare": "aiohttp + uvloop, no state",
    "conveyor": "Conveyor, durable",
    "conveyor-2": "Conveyor, two processes",
    "httpx": "httpx on Trio, no state",
}
EVERY_ROUND = ("bare", "conveyor", "conveyor-2")


class Summary(msgspec.Struct, frozen=True):
    """One arm: medians over all rounds, and medians of its ratios to the bare loop of a round."""

    cpu_ms: float
    cpu_ratio: float
    pages_per_s: float
    rate_ratio: float
    rate_ratio_least: float
    rate_ratio_most: float
    rss_mb: float


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench throughput", description=__doc__)
    parser.add_argument("--n", type=int, default=10_000, help="pages per arm")
    parser.add_argument("--concurrency", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--engine", choices=["embedded", "postgres"], default="embedded")
    options = parser.parse_args(arguments)
    if options.engine == "postgres":
        _compare_on_postgres(options.n, options.concurrency, options.rounds)
        return
    with running_origin(size_bytes=20_000, think_s=0.05) as url:
        rounds = [
            {arm: run_arm(arm, url, options.n, options.concurrency) for arm in EVERY_ROUND}
            for _ in range(options.rounds)
        ]
        httpx_count = max(500, options.n // HTTPX_SHARE)
        rounds[-1]["httpx"] = run_arm("httpx", url, httpx_count, options.concurrency)
    summaries = {arm: summarize(arm, rounds) for arm in NAMES}
    show(summaries)
    figure = figure_path("throughput", is_full_run=is_full_run(parser, options))
    draw_all(figure, summaries, options.n)
    if options.json:
        ours = summaries["conveyor"]
        line = {
            "n": options.n,
            "cpu_ratio": round(ours.cpu_ratio, 3),
            "rate_ratio": round(ours.rate_ratio, 3),
            "rss_mb": round(ours.rss_mb, 1),
        }
        print(msgspec.json.encode(line).decode())


def _compare_on_postgres(count: int, concurrency: int, rounds_count: int) -> None:
    rounds, server_ms = [], []
    with running_origin(size_bytes=20_000, think_s=0.05) as url:
        for _ in range(rounds_count):
            measured = {"bare": run_arm("bare", url, count, concurrency)}
            for name, arm in (("conveyor", "drain"), ("conveyor-2", "drain-2")):
                measured[name], cpu_ms = _drain_on_postgres(arm, url, count, concurrency)
                server_ms.append(cpu_ms)
            rounds.append(measured)
    show({arm: summarize(arm, rounds) for arm in EVERY_ROUND})
    print(f"CPU of the PostgreSQL server, its start included: {median(server_ms):.3f} ms a page")
    _compare_slots(count // SLOW_SHARE, concurrency // 2)


def _compare_slots(count: int, slots: int) -> None:
    """Prints the pages per second of one and of two processes with `slots` each, at a slow site."""
    with running_origin(size_bytes=20_000, think_s=SLOW_S) as url:
        one, two = (
            _drain_on_postgres(arm, url, count * number, slots * number)[0]
            for number, arm in ((1, "drain"), (2, "drain-2"))
        )
    print(
        f"{slots} slots a process, pages of {SLOW_S} s: one process {one.pages_per_s:.0f} pages/s, "
        f"two {two.pages_per_s:.0f}, {two.pages_per_s / one.pages_per_s:.2f}x"
    )


def _drain_on_postgres(arm: str, url: str, count: int, concurrency: int) -> tuple[Measured, float]:
    """Runs an arm on a new server. Also returns the CPU time of that server, in ms a page."""
    with (
        a_postgres(DURABLE) as server,
        tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as folder,
    ):
        line = postgres_variants.run_arm(arm, str(count), folder, server.url, url, str(concurrency))
        return msgspec.json.decode(line, type=Measured), server.cpu_s() / count * 1000


def summarize(arm: str, rounds: Sequence[Mapping[str, Measured]]) -> Summary:
    pairs = [
        (round_results[arm], round_results["bare"])
        for round_results in rounds
        if arm in round_results
    ]
    rate_ratios = [ours.pages_per_s / bare.pages_per_s for ours, bare in pairs]
    return Summary(
        cpu_ms=median(ours.cpu_ms_per_page for ours, _ in pairs),
        cpu_ratio=median(ours.cpu_ms_per_page / bare.cpu_ms_per_page for ours, bare in pairs),
        pages_per_s=median(ours.pages_per_s for ours, _ in pairs),
        rate_ratio=median(rate_ratios),
        rate_ratio_least=min(rate_ratios),
        rate_ratio_most=max(rate_ratios),
        rss_mb=max(ours.rss_mb for ours, _ in pairs),
    )


def run_arm(arm: str, url: str, count: int, concurrency: int) -> Measured:
    folder = Path(tempfile.mkdtemp(dir=".", prefix=".bench-"))
    try:
        command = [
            sys.executable,
            "-m",
            "bench.throughput_variants",
            arm,
            url,
            str(count),
            str(concurrency),
        ]
        done = subprocess.run([*command, str(folder)], check=True, stdout=subprocess.PIPE)
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=Measured)
    finally:
        shutil.rmtree(folder)


def show(summaries: Mapping[str, Summary]) -> None:
    print(f"{'':34}{'CPU ms':>8}{'ratio':>8}{'pages/s':>9}{'ratio':>8}{'spread':>12}{'RSS MB':>8}")
    for arm, summary in summaries.items():
        spread = f"{summary.rate_ratio_least:.2f}-{summary.rate_ratio_most:.2f}"
        print(
            f"{NAMES[arm]:34}{summary.cpu_ms:>8.3f}{summary.cpu_ratio:>7.2f}x"
            f"{summary.pages_per_s:>9,.0f}{summary.rate_ratio:>7.2f}x{spread:>12}{summary.rss_mb:>8.0f}"
        )


def draw_all(figure: Path, summaries: Mapping[str, Summary], count: int) -> None:
    panels = [
        Panel(
            "CPU per page, as a multiple of the bare loop",
            [(arm, summary.cpu_ratio) for arm, summary in summaries.items()],
            "x",
        ),
        Panel(
            "pages per second", [(arm, summary.pages_per_s) for arm, summary in summaries.items()]
        ),
        Panel("peak memory", [(arm, summary.rss_mb) for arm, summary in summaries.items()], "MB"),
    ]
    draw(figure, f"{count:,} pages of 20 KB, 50 ms think time", panels)
