"""Interrupts `conveyor scrape` at random moments and resumes it, until enough interruptions hit.

`python -m tests.cli.interruptions --kills 60` runs the long form and prints the figures. A list of
pages is scraped again and again, each time with a random number of kills and Ctrl-Cs at any moment
from the first line of the program to its exit; at the end each folder must be whole. Before that
line, the interpreter itself answers a Ctrl-C: it is killed, or shows a traceback of its own start.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conveyor.cli.demo import Site, is_flaky, is_missing, is_slow, site_in_a_thread
from conveyor.cli.scrape.helpers import PREFETCH
from tests.cli.program import Program, catches_sigterm, wait_until

CONCURRENCY = 20
# The longest time after its start at which a command is interrupted; most lists end before.
WINDOW_S = 4.0
PATIENCE_S = 120


@dataclass(slots=True)
class Figures:
    """What the interruptions came to.

    `refetched_max` is the most pages of one folder that were fetched again, less those in flight at
    its interruptions: at most 0.
    """

    folders: int = 0
    kills: int = 0
    interrupts: int = 0
    too_late: int = 0
    pages: int = 0
    refetched: int = 0
    refetched_max: int = 0
    tracebacks: int = 0
    wrong_codes: int = 0
    slowest_exit_s: float = 0.0
    wrong_pages: int = 0
    first_traceback: str = ""

    @property
    def hits(self) -> int:
        return self.kills + self.interrupts


def interrupt_often(folder: Path, site: Site, count: int, pages: int, seed: int) -> Figures:
    chance, figures = random.Random(seed), Figures()
    # A shell lets its background jobs ignore Ctrl-C, and the command would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    numbers = [
        number
        for number in range(pages * 2)
        if not (is_missing(number) or is_flaky(number) or is_slow(number))
    ][:pages]
    program = Program(folder, {"CONVEYOR_ALLOW_PRIVATE_TARGETS": "1"})
    program.write("list.txt", *(f"http://127.0.0.1:{site.port}/page/{n}" for n in numbers))
    while figures.hits < count:
        site.request_counts.clear()
        out = f"out{figures.folders}"
        processes = chance.choice([1, 2])
        command = ["scrape", "list.txt", "-o", out, "-c", str(CONCURRENCY)]
        command += ["--processes", str(processes)]
        hits_here = 0
        while _interrupt_once(program, command, chance, figures):
            hits_here += 1
        figures.folders += 1
        figures.pages += pages
        # A retry after a failure, as on a busy machine, is no refetch.
        rows = _read_results(folder / out)
        again = site.request_counts.total() - sum(row["attempts"] for row in rows)
        figures.refetched += again
        bound = hits_here * _in_flight_max(processes)
        figures.refetched_max = max(figures.refetched_max, again - bound)
        figures.wrong_pages += _count_wrong(folder / out, rows, pages)
        shutil.rmtree(folder / out)
    return figures


def _in_flight_max(processes: int) -> int:
    """Returns how many pages are in flight at most: a helper has more pages than it fetches."""
    slots = CONCURRENCY // processes
    return slots + (processes - 1) * int(slots * PREFETCH)


def _interrupt_once(
    program: Program, command: list[str], chance: random.Random, figures: Figures
) -> bool:
    """Starts the command and interrupts it. Returns False if it ended by itself."""
    how = chance.choice([signal.SIGKILL, signal.SIGINT])
    with program.start(*command) as process:
        wait_until(lambda: catches_sigterm(process.pid) or process.poll() is not None)
        try:
            process.wait(chance.uniform(0.0, WINDOW_S))
        except subprocess.TimeoutExpired:
            process.send_signal(how)
        sent_at = time.monotonic()
        _, err = process.communicate(timeout=PATIENCE_S)
    if "Traceback" in err:
        figures.tracebacks += 1
        figures.first_traceback = figures.first_traceback or err[-2000:]
    if process.returncode == 0:
        figures.too_late += 1
        return False
    if how is signal.SIGINT:
        figures.interrupts += 1
        figures.slowest_exit_s = max(figures.slowest_exit_s, time.monotonic() - sent_at)
        figures.wrong_codes += process.returncode != 130
    else:
        figures.kills += 1
        figures.wrong_codes += process.returncode != -signal.SIGKILL
    return True


def _read_results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def _count_wrong(folder: Path, rows: list[dict[str, Any]], pages: int) -> int:
    names = {path.name for path in folder.iterdir()} - {"results.jsonl", ".conveyor"}
    wrong = len(names ^ {row["file"] for row in rows})
    wrong += [row["index"] for row in rows] != list(range(pages))
    for row in rows:
        body = (folder / row["file"]).read_bytes()
        wrong += hashlib.sha256(body).hexdigest() != row["sha256"]
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--pages", type=int, default=1_500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, site_in_a_thread() as site:
        print(interrupt_often(Path(folder), site, options.kills, options.pages, options.seed))


if __name__ == "__main__":
    main()
