"""Writes the part of MATRIX.md that is about the AWS engine."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from tests.chaos.page import AWS, write_part
from tests.chaos.site_program import SIDES


class Crash(Protocol):
    @property
    def call(self) -> str: ...
    @property
    def count(self) -> int: ...
    @property
    def side(self) -> str: ...
    @property
    def step(self) -> str: ...


def write_aws(
    depth: str,
    of_api: Sequence[Crash],
    of_worker: Sequence[Crash],
    missed: Collection[Crash],
    bad: Sequence[str],
) -> None:
    """Writes the outcomes. All processes use one deployment, which is audited at the end."""
    outcomes = [*of_api, *of_worker]
    write_part(
        AWS,
        "\n".join(
            [
                "## AWS, over the local servers",
                "",
                f"Written with `CONVEYOR_TEST_CRASH_POINTS={depth}`: an API or a worker process",
                "ends at a call of its engine, the other processes continue, and the client",
                "repeats its request with the same key. Then every task must have ended once, and",
                "the auditor must find nothing.",
                "",
                f"- {len(of_api)} points of the API, {len(of_worker)} of workers.",
                f"- {len(outcomes) - len(missed)} deaths, {len(missed)} points not reached.",
                f"- **{len(bad)} bad outcomes.**",
                *(f"- BAD: {complaint}" for complaint in bad),
                "",
                "| engine | process | request | call | before | after |",
                "|---|---|---|---|---|---|",
                *_rows("api", of_api, missed),
                *_rows("worker", of_worker, missed),
                "",
            ]
        ),
    )


def _rows(process: str, points: Sequence[Crash], missed: Collection[Crash]) -> list[str]:
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for point in points:
        name = f"{point.call}:{point.count}"
        met = "not met" if point in missed else "died"
        step = point.step or ("its start" if process == "api" else "work of every kind")
        cells.setdefault((step, name), {})[point.side] = met
    return [
        f"| aws | {process} | {step} | `{name}` | "
        + " | ".join(sides.get(side, "-") for side in SIDES)
        + " |"
        for (step, name), sides in cells.items()
    ]
