"""SPEC.md says what the code says: diagrams, stored fields, limits, settings, codes, sections."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from conveyor.domain import (
    budget,
    events,
    export,
    hooks,
    hosts,
    inputs,
    lifecycle,
    limits,
    model,
    schedules,
)
from conveyor.domain.changes import Row
from conveyor.domain.errors import Refused
from conveyor.domain.params import PARAMS
from conveyor.domain.retry import BACKOFF
from conveyor.simulation.checkers.problems import CODES
from tests.tidy.sources import CODE, ROOT, modules

SPEC = (ROOT / "SPEC.md").read_text(encoding="utf-8")
TABLES: dict[str, lifecycle.Table[Any]] = {
    "JOB": lifecycle.JOB,
    "RUN": lifecycle.RUN,
    "TASK": lifecycle.TASK,
    "BATCH": lifecycle.BATCH,
    "GATE": lifecycle.GATE,
    "NOTICE": lifecycle.NOTICE,
    "SCHEDULE": lifecycle.SCHEDULE,
    "EXPORT": lifecycle.EXPORT,
}
STRUCTS: tuple[type[msgspec.Struct], ...] = (
    model.Job,
    model.Run,
    model.Batch,
    model.Stats,
    model.Task,
    model.KeyRecord,
    model.Notice,
    model.Scrub,
    events.Event,
    events.Feed,
    export.Export,
    export.Manifest,
    model.TaskSpec,
    model.TaskRef,
    model.Result,
    model.Attempt,
    model.Problem,
    model.Webhook,
    model.StagedList,
    model.RowsOf,
    hooks.SigningKeys,
    hooks.SigningKey,
    hooks.Try,
    schedules.Schedule,
    schedules.At,
    schedules.Rate,
    schedules.Calendar,
    schedules.Cron,
    schedules.Skip,
    inputs.JobInput,
    inputs.UploadedList,
    inputs.ListSpec,
    budget.Budget,
    budget.Share,
    budget.BudgetCap,
    hosts.HostLimits,
    hosts.HostLimit,
)

_HEADING = re.compile(r"^#+ ((?:\d+\.)*\d+) ", re.MULTILINE)
_REFERENCE = re.compile(r"SPEC (\d+(?:\.\d+)*(?:, \d+(?:\.\d+)*)*)")


def section(title: str) -> str:
    """The text under a heading, up to the next of the same depth or above."""
    marks = title.partition(" ")[0]
    start = SPEC.index(f"\n{title}\n") + len(title) + 2
    following = re.compile(rf"^#{{1,{len(marks)}}} ", re.MULTILINE).search(SPEC, start)
    return SPEC[start : following.start() if following else len(SPEC)]


def first_column(text: str) -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


@pytest.mark.parametrize("name", sorted(TABLES))
def test_each_diagram_is_the_one_its_table_draws(name: str) -> None:
    diagrams = re.findall(r"```mermaid\n(.*?)\n```", section("### 2.4 State machines"), re.DOTALL)

    assert lifecycle.mermaid(TABLES[name]) in diagrams
    assert len(diagrams) == len(TABLES)


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: str(struct.__name__))
def test_each_stored_field_has_a_row_in_the_order_of_the_struct(
    struct: type[msgspec.Struct],
) -> None:
    fields = first_column(section(f"#### {struct.__name__}"))

    assert fields == list(struct.__struct_fields__)


def test_every_kind_of_row_has_a_table_of_its_fields() -> None:
    rows: tuple[type[msgspec.Struct], ...] = Row.__args__

    assert set(rows) <= set(STRUCTS)


def test_every_limit_stands_in_the_table_with_its_value() -> None:
    shown = re.findall(r"^\| `([A-Z_]+)` \| (\S+) \|", section("## 9 Limits"), re.MULTILINE)

    written = [(name, value) for name, value in vars(limits).items() if name.isupper()]
    assert [name for name, _ in shown] == [name for name, _ in written]
    assert [float(value) for _, value in shown] == [float(value) for _, value in written]


def test_every_setting_stands_in_the_table_and_nothing_else_does() -> None:
    (config,) = (each for each in modules("conveyor") if each.name == "conveyor/config.py")

    read = set(re.findall(r"\bCONVEYOR_[A-Z_]+\b", config.text))
    assert set(first_column(section("### 1.3 Settings"))) == read


def test_every_problem_code_stands_in_the_table_of_errors() -> None:
    table = section("### 4.3 Errors")

    codes = {kind.code for kind in _family(Refused)}
    for module in modules("conveyor/usecases", "conveyor/api", "conveyor/domain"):
        codes |= set(re.findall(r"\bcode=\"([a-z_]+)\"", module.text))
        codes |= set(re.findall(r"\bKind\(\s*\d+,\s*\"([a-z_]+)\"", module.text))
    missing = sorted(code for code in codes if f"`{code}`" not in table)
    assert missing == []


def test_the_simulator_knows_the_table_of_errors() -> None:
    rows = re.findall(r"^\| (`.*?`) \| (\d{3}) \|", section("### 4.3 Errors"), re.MULTILINE)

    told = {(code, int(status)) for codes, status in rows for code in re.findall(r"`(.*?)`", codes)}
    assert told == {(code, status) for status, codes in CODES.items() for code in codes}


def _family(kind: type[Refused]) -> set[type[Refused]]:
    return {kind}.union(*(_family(child) for child in kind.__subclasses__()))


def test_every_parameter_is_named_in_its_section() -> None:
    text = section("### 4.4 Scraper parameters")

    assert [key for key in sorted(PARAMS) if f"`{key}`" not in text] == []


def test_every_reason_for_failure_is_named_with_the_counters() -> None:
    text = section("### 2.3 Counters")

    assert [reason for reason in model.FailureReason if f"`{reason}`" not in text] == []
    assert set(BACKOFF) == set(model.FailureReason)


def test_every_section_that_the_code_refers_to_exists() -> None:
    headings = set(_HEADING.findall(SPEC))

    lost = [
        f"{module.name}: SPEC {number}"
        for module in modules(*CODE, "tests", "bench")
        for found in _REFERENCE.findall(module.text)
        for number in found.split(", ")
        if number not in headings
    ]
    assert lost == []
