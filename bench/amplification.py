"""Measures how often a message is received before its task runs, with and without permits.

This is the experiment of the reference design: 500 tasks, a cap of 5 tasks in flight, 50
dispatchers in one process, real pollers on a real SQS engine. Three arms differ in what a
dispatcher does before a receive:

- `off`: nothing. It receives a message and learns afterwards that the job is at its cap.
- `local gate`: it counts the tasks of its own process, and pauses after a refusal.
- `permits`: it acquires a shared lease for each message, as the product does.

The first two arms wrap the ports of the same poller (bench/late_leases.py). Then the bench repeats
the arms with 3,334 tasks and the dispatchers of four processes on one queue, and kills one of the
four. It runs on a model of SQS in virtual time, and on an SQS-compatible server in real time.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections.abc import Callable, Mapping

import msgspec
import trio
from trio.testing import MockClock

from bench.dispatch import Arm, Drained, Gate, Link, Shared, drain
from bench.svg_chart import Panel, draw, figure_path, is_full_run
from conveyor.engines.memory import memory_engine
from conveyor.engines.system import VirtualClock
from conveyor.simulation.models.aws import AwsModel
from conveyor.simulation.models.fault_source import FaultSource

SQS_S, LEASES_S = 0.02, 0.01
DEFINITIONS = """\
receives  messages that the queue delivered, per task
calls     receive calls, of up to ten messages each; empty ones find no message
dead      tasks that ended without a page; run queues have no dead-letter queue
"""

ONE_PROCESS = {
    "off": Arm(name="off", gate=Gate.OFF),
    "local_gate": Arm(name="local gate", gate=Gate.LOCAL),
    "permits": Arm(name="permits"),
}
PROCESSES = {
    "off_processes": Arm(name="off", gate=Gate.OFF, tasks=3_334, cap=20, processes=4),
    "local_gate_processes": Arm(
        name="local gate", gate=Gate.LOCAL, tasks=3_334, cap=20, processes=4
    ),
    "permits_processes": Arm(name="permits", tasks=3_334, cap=20, processes=4),
}
KILLED = {"permits_killed": Arm(name="permits, one killed", processes=4, killed_at=100)}

Results = dict[str, tuple[Arm, Drained]]
OnProgress = Callable[[int], None]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench amplification", description=__doc__)
    parser.add_argument("--model-only", action="store_true", help="skip the arms on local servers")
    parser.add_argument(
        "--short", action="store_true", help="the worker processes drain a tenth of the tasks"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    logging.disable(
        logging.WARNING
    )  # The surviving processes log many warnings about the killed one.
    print(DEFINITIONS)
    print(f"A model of SQS ({SQS_S * 1e3:.0f} ms a call, leases {LEASES_S * 1e3:.0f} ms):")
    modelled = run_all({**ONE_PROCESS, **PROCESSES, **KILLED}, in_model)
    measured: Results = {}
    if not options.model_only:
        from bench.multi_process import run_on_servers

        measured = run_on_servers(short=options.short)
    panels = panels_of("modelled SQS", modelled) + panels_of("SQS server", measured)
    is_full = bool(measured) and is_full_run(parser, options)
    figure = figure_path("amplification", is_full_run=is_full)
    draw(figure, "Receives per delivered message", panels)
    if options.json:
        names = ("off", "local_gate", "permits", "permits_processes")
        line = {name: round(modelled[name][1].amplification, 3) for name in names}
        print(msgspec.json.encode(line).decode())


def run_all(arms: Mapping[str, Arm], run: Callable[[Arm, OnProgress], Drained]) -> Results:
    """Runs the arms one after the other and prints a row for each."""
    print_header()
    results = {}
    for key, arm in arms.items():
        results[key] = (arm, run(arm, make_progress_line(arm)))
        print_row(*results[key])
    print(summarize(results))
    return results


def summarize(results: Results) -> str:
    """Returns a line that states whether every arm has ended all its tasks."""
    incomplete = [arm.name for arm, drained in results.values() if drained.done < drained.tasks]
    if incomplete:
        return f"  NOT complete: {', '.join(incomplete)}"
    sizes = dict.fromkeys(f"{drained.done:,}/{drained.tasks:,}" for _, drained in results.values())
    return (
        f"  every arm complete ({', '.join(sizes)}), 0 dead; run queues have no dead-letter queue"
    )


def in_model(arm: Arm, on_progress: OnProgress) -> Drained:
    return trio.run(model, arm, on_progress, clock=MockClock(autojump_threshold=0))


async def model(arm: Arm, on_progress: OnProgress = lambda done: None) -> Drained:
    """Runs an arm in virtual time. The caller provides a clock that advances by itself."""
    clock, randomness = VirtualClock(1_700_000_000.0), random.Random(1)
    memory = memory_engine(clock=clock, random=randomness)
    shared = Shared(
        transport=AwsModel(clock=clock, fault_source=FaultSource(random=randomness)),
        coordinator=memory.coordinator,
        memory=memory,
        clock=clock,
        random=randomness,
    )
    return await drain(shared, arm, lambda: Link(randomness, SQS_S, LEASES_S), on_progress)


def make_progress_line(arm: Arm) -> OnProgress:
    """Returns a function that prints the progress of an arm, if stderr is a terminal."""
    if not sys.stderr.isatty():
        return lambda done: None

    def on_progress(done: int) -> None:
        end = "\r" if done < arm.tasks else "\r\033[K"
        print(f"  {arm.name}: {done:,} of {arm.tasks:,}", end=end, file=sys.stderr, flush=True)

    return on_progress


def print_header() -> None:
    print(
        f"  {'':20}{'processes':>10}{'cap':>5}{'receives':>10}{'tasks/s':>9}{'elapsed':>10}"
        f"{'done':>13}{'dead':>6}{'calls':>9}{'empty':>9}"
    )


def print_row(arm: Arm, drained: Drained) -> None:
    print(
        f"  {arm.name:20}{arm.processes:>10}{arm.cap:>5}{drained.amplification:>10.3f}"
        f"{drained.tasks / drained.seconds:>9.1f}{drained.seconds:>8.1f} s"
        f"{f'{drained.done:,}/{drained.tasks:,}':>13}{drained.dead:>6}"
        f"{drained.calls:>9,}{drained.empty_calls:>9,}",
        flush=True,
    )


def panels_of(where: str, results: Results) -> list[Panel]:
    """Returns one chart panel for each combination of task count, cap and process count."""
    panels = []
    for tasks, cap, processes in dict.fromkeys(
        (arm.tasks, arm.cap, arm.processes) for arm, _ in results.values()
    ):
        bars = [
            (arm.name, drained.amplification)
            for arm, drained in results.values()
            if (arm.tasks, arm.cap, arm.processes) == (tasks, cap, processes)
        ]
        plural = "process" if processes == 1 else "processes"
        title = f"{where}: {tasks:,} tasks, a cap of {cap}, {processes} {plural}"
        panels.append(Panel(title, bars, "x"))
    return panels
