"""What many seeds came to, as a page to keep: `conveyor simulate --report FILE`
(docs/simulator.md)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from conveyor.simulation.suite import JUDGED_FROM, UNASKED, Summary

EVERY = 50
"""It is written anew after so many seeds: a long run that is cut off has told what it saw."""


def write_report(path: Path, summary: Summary, seeds: range) -> None:
    path.write_text("".join(f"{line}\n" for line in lines_of(summary, seeds)), encoding="utf-8")


def lines_of(summary: Summary, seeds: range) -> Iterator[str]:
    done = seeds[: summary.seeds]
    yield "# The program in simulated worlds"
    yield ""
    yield f"`conveyor simulate --from {seeds.start} --seeds {len(done)}`"
    yield ""
    engines = ", ".join(f"{count:,} {name}" for name, count in sorted(summary.engines.items()))
    yield from _table(
        ("", ""),
        {
            "seeds": f"{summary.seeds:,} ({engines})",
            "virtual hours": f"{summary.virtual_s / 3600:,.0f}",
            "seconds a seed": f"{summary.took_s / max(summary.seeds, 1):.1f} (of one core)",
            "requests of clients": f"{summary.requests:,}",
            "calls of engines": f"{summary.calls:,}",
            "processes killed": f"{summary.kills:,}",
            "faults": f"{sum(summary.faults.values()):,}",
            "invariants broken": f"{summary.violations:,}",
            "runs that never ended": f"{summary.liveness_failures:,}",
            "crashes": f"{summary.crashes:,}",
            "seeds that failed": ", ".join(map(str, summary.failed)) or "none",
            "hash": f"`{summary.hash}`",
        }
        | {f"hash of the first {count:,}": f"`{mark}`" for count, mark in summary.marks.items()},
    )
    yield ""
    yield _never_struck(summary)
    yield ""
    names = sorted({*summary.possible(), *summary.faults})
    yield from _table(("fault", "struck"), {name: f"{summary.faults[name]:,}" for name in names})


def _never_struck(summary: Summary) -> str:
    """What the suite fails for, and what it lets be."""
    if summary.seeds < JUDGED_FROM:
        return (
            f"Fewer than {JUDGED_FROM} seeds: faults that never struck are not held against them."
        )
    missing = ", ".join(summary.never_struck()) or "none"
    unasked = ", ".join(sorted(UNASKED & {*summary.possible()} - {*+summary.faults})) or "none"
    return f"Should have struck and never did: {missing}; nothing asks for it: {unasked}."


def _table(heads: tuple[str, str], rows: dict[str, str]) -> Iterator[str]:
    yield f"| {heads[0]} | {heads[1]} |"
    yield "|---|---|"
    for name, text in rows.items():
        yield f"| {name} | {text} |"
