"""Tests `python -m bench walk`, which lists the modules that one task executes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise

import pytest

from tests.tidy.sources import ROOT

pytestmark = pytest.mark.slow

STEPS = (
    "submit",
    "dispatch",
    "fetch",
    "store",
    "settle",
    "complete",
    "webhook",
    "read results",
    "read content",
)


@pytest.fixture(scope="module")
def printed() -> str:
    command = [sys.executable, "-m", "bench", "walk", "--json"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def steps_of(printed: str, engine: str) -> dict[str, list[str]]:
    """Returns the modules of each step of a walk, in order."""
    (walk,) = re.findall(rf"(?ms)^{engine}\n(.+?)^\S", printed)
    parts = re.split(r"(?m)^  (\w[\w ]*)$", walk)[1:]
    return {
        step: re.findall(r"(?m)^    (\S+):", lines)
        for step, lines in zip(parts[::2], parts[1::2], strict=True)
    }


def are_passed_in_order(modules: Sequence[str], *expected: str) -> bool:
    first = [modules.index(module) for module in expected]
    return all(before < after for before, after in pairwise(first))


@pytest.mark.parametrize("engine", ["embedded", "aws"])
def test_a_walk_lists_the_modules_of_each_step_in_order(printed: str, engine: str) -> None:
    steps = steps_of(printed, engine)

    assert tuple(steps) == STEPS
    assert are_passed_in_order(
        steps["submit"],
        "conveyor/api/server/app",
        "conveyor/usecases/idempotency",
        "conveyor/usecases/submit/jobs",
    )
    # Admission validates lines while the request is decoded, and admits them after the key.
    assert "conveyor/domain/submit/admission" in steps["submit"]
    assert are_passed_in_order(
        steps["dispatch"],
        "actors/queue_discovery",
        "actors/poller/poller",
        "conveyor/usecases/run/tasks",
    )
    assert are_passed_in_order(
        steps["fetch"],
        "actors/task_runner",
        "conveyor/engines/http/direct",
        "conveyor/http_client/pool",
    )
    assert steps["store"][0] == "conveyor/usecases/run/tasks"
    assert are_passed_in_order(
        steps["settle"], "actors/shard_writer", "conveyor/domain/run/settlement"
    )
    assert are_passed_in_order(
        steps["complete"], "conveyor/usecases/run/runs", "conveyor/domain/run/termination"
    )
    assert are_passed_in_order(
        steps["webhook"], "actors/completion_notifier", "conveyor/engines/http/webhook"
    )
    assert are_passed_in_order(
        steps["read results"], "conveyor/api/results", "conveyor/usecases/run/results"
    )
    assert are_passed_in_order(
        steps["read content"], "conveyor/api/results", "conveyor/usecases/run/results"
    )


def test_a_walk_lists_modules_of_its_engine_and_no_model(printed: str) -> None:
    embedded = {module for step in steps_of(printed, "embedded").values() for module in step}
    aws = {module for step in steps_of(printed, "aws").values() for module in step}

    assert {"conveyor/engines/sqlite/store", "conveyor/engines/sqlite/pack_files"} <= embedded
    assert {"conveyor/engines/aws/client/client", "conveyor/engines/redis/coordinator"} <= aws
    assert not any("/engines/aws/" in module for module in embedded)
    assert not any("/engines/embedded/" in module for module in aws)
    assert not any("/simulation/" in module for module in embedded | aws)


def test_the_last_line_counts_the_files_of_both_walks(printed: str) -> None:
    counts = json.loads(printed.splitlines()[-1])

    for engine in ("embedded", "aws"):
        modules = {module for step in steps_of(printed, engine).values() for module in step}
        assert counts[f"{engine}_files"] == len(modules)
    assert set(counts) == {"embedded_files", "aws_files"}
