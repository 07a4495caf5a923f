"""No engine contains a status: legal statuses are passed to engines as data."""

from __future__ import annotations

import ast
import re
from enum import StrEnum

import pytest

from conveyor.domain.crawl_record import CrawlStatus
from conveyor.domain.export_record import ExportStatus
from conveyor.domain.model import (
    BatchStatus,
    CounterState,
    JobStatus,
    NoticeStatus,
    RunStatus,
    TaskStatus,
)
from conveyor.domain.schedule import ScheduleStatus
from tests.tidy.sources import ROOT, Module, modules

ENUMS: tuple[type[StrEnum], ...] = (
    BatchStatus,
    ExportStatus,
    CounterState,
    CrawlStatus,
    JobStatus,
    NoticeStatus,
    RunStatus,
    ScheduleStatus,
    TaskStatus,
)
WORDS = frozenset(status.value for enum in ENUMS for status in enum)
NAMES = frozenset(enum.__name__ for enum in ENUMS)

# In SQL a status is a quoted word. Without quotes the same word is a column, a keyword or English.
_QUOTED = re.compile(rf"'({'|'.join(sorted(WORDS))})'")
_SQL_COMMENT = re.compile(r"--[^\n]*|/\*.*?\*/", re.DOTALL)


def find_spelled(tree: ast.Module) -> list[int]:
    """The lines that name a member of a status enum, or contain a status as text or in SQL."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and _is_member(node))
        or (isinstance(node, ast.Constant) and _is_status(node.value))
    ]


def _is_member(node: ast.Attribute) -> bool:
    return ast.unparse(node.value).rpartition(".")[2] in NAMES and node.attr.isupper()


def _is_status(value: object) -> bool:
    return isinstance(value, str) and (value in WORDS or _QUOTED.search(value) is not None)


def test_no_engine_contains_a_status_in_python() -> None:
    engines: tuple[Module, ...] = modules("conveyor/engines")

    problems = [f"{module.name}:{line}" for module in engines for line in find_spelled(module.tree)]

    assert engines
    assert problems == []


def test_no_engine_contains_a_status_in_sql() -> None:
    scripts = sorted((ROOT / "conveyor" / "engines").rglob("*.sql"))

    problems = {
        script.name: words
        for script in scripts
        if (words := _QUOTED.findall(_SQL_COMMENT.sub("", script.read_text(encoding="utf-8"))))
    }

    assert scripts
    assert problems == {}


@pytest.mark.parametrize(
    "code",
    [
        'status = "failed"',
        "x = RunStatus.RUNNING",
        "sql = \"UPDATE runs SET status = 'stopped'\"",
        "f\"... status IN ('open')\"",
    ],
)
def test_a_status_in_an_engine_is_found(code: str) -> None:
    assert find_spelled(ast.parse(code)) == [1]


@pytest.mark.parametrize(
    "code",
    [
        "blobs.open(key)",
        'sql = "SELECT failed, successful FROM stats"',
        '"""The run has failed or is open."""',
        "RunStatus(text)",
    ],
)
def test_words_that_are_no_status_are_not_reported(code: str) -> None:
    assert find_spelled(ast.parse(code)) == []
