"""The table and the figure of `python -m bench scale`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from bench.svg_chart import Panel, draw

RESULTS = Path(__file__).parent / "results"
COLD = 4_000.0
PARTITION_WRITES = 1_000.0
SHORT_LIST_TASKS = 10
SLOTS = ("slots", "more workers")


class Arm(msgspec.Struct, frozen=True):
    """A fleet to measure, and the capacity of its table."""

    workers: int
    shards: int
    table_writes: float

    @property
    def label(self) -> str:
        heat = "cold" if self.table_writes == COLD else "warm"
        return f"{self.workers} workers, {self.shards} shards, {heat}"


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a fleet. `tasks` is the length of the long list; `part` of them were run."""

    label: str
    tasks: int
    part: int
    callers: int
    slots: int
    think_s: float
    tasks_per_s: float
    slots_busy: float
    partition_load: float
    hottest: str
    table_load: float
    throttled_per_task: float
    calls_per_task: dict[str, float]
    write_units_per_task: float
    usd_per_million: float
    fetched_twice: int
    small_s: float
    small_worst_s: float
    solo_s: float
    cpu_s: float

    @property
    def drain_h(self) -> float:
        return self.tasks / self.tasks_per_s / 3600

    @property
    def unfairness(self) -> float:
        """The slowest short list, as a multiple of the time it takes on an idle fleet."""
        return self.small_worst_s / self.solo_s

    @property
    def shared(self) -> tuple[float, str, str]:
        """The most loaded resource of those that all workers share: its load, its name, and the
        change that raises its limit."""
        return max(
            (self.partition_load, "a partition", "more shards"),
            (self.table_load, "the table", "warm throughput"),
        )

    @property
    def limit(self) -> tuple[str, str]:
        """The resource that is nearest to its limit, and the change that raises the limit."""
        load, what, lift = self.shared
        return (what, lift) if load > self.slots_busy else SLOTS

    @property
    def next_limit(self) -> str:
        """The limit that more workers would reach, and at how many, if load is proportional."""
        load, what, lift = self.shared
        workers = int(self.label.split()[0])
        return f"{what}, at about {workers / load:.0f} workers: {lift}"

    def line(self) -> dict[str, object]:
        what, lift = self.limit
        derived = {"drain_h": self.drain_h, "unfairness": self.unfairness, "next": self.next_limit}
        return {**msgspec.structs.asdict(self), **derived, "limit": what, "lift": lift}


FormatCell = Callable[[Measured], str]


def keep(measured: Measured) -> None:
    results = {result.label: result for result in all_kept()}
    results[measured.label] = measured
    lines = [msgspec.json.encode(result).decode() for _, result in sorted(results.items())]
    (RESULTS / "scale.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


def all_kept() -> list[Measured]:
    path = RESULTS / "scale.json"
    return msgspec.json.decode(path.read_bytes(), type=list[Measured]) if path.exists() else []


def show(measured: Sequence[Measured]) -> None:
    for result in measured:
        print(f"\n{result.label}")
        for name, format_cell in ROWS:
            print(f"  {name:44}{format_cell(result)}")


def write_all(labels: Sequence[str]) -> None:
    """Writes the table and the figure of all stored fleets, in the order of `labels`."""
    results = {result.label: result for result in all_kept()}
    measured = [results[label] for label in labels if label in results]
    (RESULTS / "scale.md").write_text(_page(measured))
    _draw(measured)


def _page(measured: Sequence[Measured]) -> str:
    one = measured[0]
    lines = [
        "# Fleets on modelled AWS: which resource limits them, and what raises the limit",
        "",
        "Written by `python -m bench scale`. Real workers run in virtual time on models of",
        "DynamoDB, SQS, S3 and Redis with the documented limits of DynamoDB: 1,000 write units a",
        "second per partition, and for the table 4,000 while it is new (cold) or 40,000 with warm",
        f"throughput. A worker has {one.slots} pages in flight; a page takes {one.think_s:g} s.",
        f"One caller has a list of {one.tasks:,} pages, many others of {SHORT_LIST_TASKS} pages.",
        "The long list may have as many pages in flight as the fleet has slots: with the default",
        "`max_inflight` of 100 that cap would be the first limit. The gateway refuses no call.",
        "",
        "Where the row `run` shows a part of the list, hours and prices are extrapolated from that",
        "part. Rates and loads are measured in the middle of the run, for all lists together: the",
        "time in which slots fill up and the last pages are not part of them. Calls, units and",
        "prices include all tasks. The price includes neither Redis, which is billed by the hour,",
        "nor workers and pages. Short lists create a job for few pages, so compare calls, units",
        "and prices only between fleets with the same number of callers.",
        "`the limit with more workers` assumes that loads grow in proportion to the workers.",
        "",
        "| | " + " | ".join(result.label for result in measured) + " |",
        "|---|" + "---:|" * len(measured),
    ]
    for name, format_cell in ROWS:
        lines.append(f"| {name} | " + " | ".join(format_cell(result) for result in measured) + " |")
    lines += ["", "![The same as a figure](scale.svg)", ""]
    return "\n".join(lines)


def _calls(service: str) -> FormatCell:
    return lambda result: f"{result.calls_per_task.get(service, 0.0):.2f}"


ROWS: Sequence[tuple[str, FormatCell]] = (
    ("run", lambda result: f"{result.part:,} of {result.tasks:,}"),
    ("callers with a short list", lambda result: f"{result.callers - 1:,}"),
    ("tasks a second", lambda result: f"{result.tasks_per_s:,.0f}"),
    ("hours for the whole list", lambda result: f"{result.drain_h:.2f}"),
    ("**the limit of this fleet**", lambda result: result.limit[0]),
    ("**what raises it**", lambda result: result.limit[1]),
    ("the limit with more workers", lambda result: result.next_limit),
    ("slots in use", lambda result: f"{result.slots_busy:.0%}"),
    ("load of the table", lambda result: f"{result.table_load:.0%}"),
    ("load of the hottest partition (1,000 WCU/s)", lambda result: f"{result.partition_load:.0%}"),
    ("throttled writes per task", lambda result: f"{result.throttled_per_task:.2f}"),
    ("short list alone, s", lambda result: f"{result.solo_s:.1f}"),
    ("short list during the long one, median, s", lambda result: f"{result.small_s:.1f}"),
    ("short list during the long one, worst, s", lambda result: f"{result.small_worst_s:.1f}"),
    ("worst, as a multiple of alone", lambda result: f"{result.unfairness:.1f}x"),
    ("calls per task: DynamoDB", _calls("dynamodb")),
    ("calls per task: SQS", _calls("sqs")),
    ("calls per task: S3", _calls("s3")),
    ("calls per task: Redis", _calls("redis")),
    ("write units per task", lambda result: f"{result.write_units_per_task:.2f}"),
    ("list price of a million, USD", lambda result: f"{result.usd_per_million:.2f}"),
    ("pages fetched twice", lambda result: f"{result.fetched_twice:,}"),
    ("CPU of the simulation, s", lambda result: f"{result.cpu_s:.0f}"),
)


def _draw(measured: Sequence[Measured]) -> None:
    one = measured[0]
    panels = [
        Panel(
            "Tasks a second, and what limits them",
            [(result.label, result.tasks_per_s) for result in measured],
            notes=[f"limit: {result.limit[0]}, raised by {result.limit[1]}" for result in measured],
        ),
        Panel(
            f"Hours for {one.tasks:,} tasks, and the limit with more workers",
            [(result.label, result.drain_h) for result in measured],
            "h",
            notes=[f"next: {result.next_limit}" for result in measured],
        ),
        Panel(
            "Slots in use (in this and the next two charts, full width is 100 %)",
            [(result.label, 100 * result.slots_busy) for result in measured],
            "%",
            most=100,
        ),
        Panel(
            "Load of the table (its limit: cold 4,000 write units a second, warm 40,000)",
            [(e.label, 100 * e.table_load) for e in measured],
            "%",
            most=100,
        ),
        Panel(
            "Load of the hottest partition (its limit: 1,000 write units a second)",
            [(e.label, 100 * e.partition_load) for e in measured],
            "%",
            most=100,
        ),
        Panel(
            "Fairness: the slowest short list, as a multiple of its time on an idle fleet",
            [(result.label, result.unfairness) for result in measured],
            "x",
        ),
        Panel(
            "List price of a million tasks",
            [(result.label, result.usd_per_million) for result in measured],
            "USD",
            notes=[f"with {result.callers - 1:,} short lists" for result in measured],
        ),
    ]
    fewest = min(result.part for result in measured)
    title = f"Growing fleets, extrapolated from {fewest:,} tasks or more"
    draw(RESULTS / "scale.svg", title, panels)
