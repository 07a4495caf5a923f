"""Measures how fast a list of a million lines is accepted and ingested, compared with bare INSERTs.

Embedded engine: the list arrives over a real socket and is ingested as the ingest streamer does it.
The bare loop inserts the same columns into the same tables, with the same pragmas and as many rows
a commit. Both run in turn, each alone in its own process. DynamoDB: the AWS engine runs in virtual
time on a model that accepts 1,000 write units a second per partition and 4,000 for a new table.
With `--engine postgres` the bench starts a server with durable commits, and compares with one bare
COPY into a table of the same columns and indexes.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from bench import postgres_variants
from bench.ingest_model import SHARD_COUNTS, Modelled, ingest_modelled
from bench.ingest_variants import Ingested, run_arm
from bench.svg_chart import Panel, draw, figure_path, is_full_run
from tests.servers import DURABLE, a_postgres

SIZES = (10_000, 100_000, 1_000_000)
MODELLED = 12_000  # Enough rows to reach a constant rate.
WALL_S = 60.0
ARMS = {"bare": "bare INSERT loop", "conveyor": "Conveyor"}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench ingest", description=__doc__)
    parser.add_argument("--tasks", type=int, help="one list of this length instead of three")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--engine", choices=["embedded", "postgres"], default="embedded")
    options = parser.parse_args(arguments)
    sizes = SIZES if options.tasks is None else (options.tasks,)
    if options.engine == "postgres":
        measured = {size: _measure_postgres(size) for size in sizes}
        show(measured)
        if options.json:
            print(msgspec.json.encode(json_line(measured[max(sizes)])).decode())
        return
    measured = {size: {arm: measure(arm, size) for arm in ARMS} for size in sizes}
    show(measured)
    modelled = [ingest_modelled(shards, MODELLED) for shards in SHARD_COUNTS]
    show_modelled(modelled, max(sizes))
    figure = figure_path("ingest", is_full_run=is_full_run(parser, options))
    draw_all(figure, measured, modelled, max(sizes))
    if options.json:
        print(msgspec.json.encode(json_line(measured[max(sizes)])).decode())


def measure(arm: str, count: int) -> Ingested:
    folder = Path(tempfile.mkdtemp(dir=".", prefix=".bench-"))
    try:
        return run_arm(arm, count, folder)
    finally:
        shutil.rmtree(folder)


def _measure_postgres(count: int) -> dict[str, Ingested]:
    with (
        a_postgres(DURABLE) as server,
        tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as folder,
    ):
        arms = {"bare": "bare", "conveyor": "ingest"}
        return {
            name: msgspec.json.decode(
                postgres_variants.run_arm(arm, str(count), folder, server.url), type=Ingested
            )
            for name, arm in arms.items()
        }


def json_line(pair: Mapping[str, Ingested]) -> dict[str, float]:
    ours = pair["conveyor"]
    return {
        "tasks": ours.tasks,
        "accept_s": round(ours.accept_s, 2),
        "rows_per_s": round(ours.rows_per_s),
        "ratio_to_bare_insert": round(ours.rows_per_s / pair["bare"].rows_per_s, 2),
        "rss_mb": round(ours.rss_mb),
    }


def show(measured: Mapping[int, Mapping[str, Ingested]]) -> None:
    print(f"{'':28}{'accept s':>10}{'rows/s':>9}{'ratio':>8}{'CPU us':>8}{'ratio':>8}{'RSS MB':>8}")
    for size, pair in measured.items():
        bare = pair["bare"]
        for arm, result in pair.items():
            cpu_us = result.cpu_s / size * 1e6
            print(
                f"{size:>9,} {ARMS[arm]:18}{result.accept_s:>10.2f}{result.rows_per_s:>9,.0f}"
                f"{result.rows_per_s / bare.rows_per_s:>7.2f}x{cpu_us:>8.1f}"
                f"{result.cpu_s / bare.cpu_s:>7.2f}x{result.rss_mb:>8.0f}"
            )


def show_modelled(modelled: Sequence[Modelled], count: int) -> None:
    print(f"\nDynamoDB, model{'rows/s':>18}{'throttled':>11}   {count:,} rows   in {WALL_S:.0f} s")
    for result in modelled:
        print(
            f"{result.shards:>9} shards{result.rows_per_s:>17,.0f}"
            f"{result.throttled / result.tasks:>10.1%}"
            f"{count / result.rows_per_s:>11,.0f} s{result.rows_per_s * WALL_S:>11,.0f}"
        )


def draw_all(
    figure: Path,
    measured: Mapping[int, Mapping[str, Ingested]],
    modelled: Sequence[Modelled],
    count: int,
) -> None:
    every = [
        (f"{size:,} {arm}", result)
        for size, pair in measured.items()
        for arm, result in pair.items()
    ]
    panels: Sequence[Panel] = [
        Panel("rows per second", [(name, result.rows_per_s) for name, result in every]),
        Panel(
            "from the last byte to the answer",
            [(f"{size:,}", pair["conveyor"].accept_s) for size, pair in measured.items()],
            "s",
        ),
        Panel("peak memory", [(name, result.rss_mb) for name, result in every], "MB"),
        Panel(
            f"{count:,} rows into a cold DynamoDB table (model); a request may take 60 s",
            [(f"{result.shards} shards", count / result.rows_per_s) for result in modelled],
            "s",
        ),
    ]
    draw(figure, "Lists of different length, accepted and ingested", panels)
