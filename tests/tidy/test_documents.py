"""The documents agree with the code, and their links and references are valid."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from conveyor.api.server.openapi import REFERENCE
from conveyor.domain import lifecycle
from conveyor.domain.errors import Refused
from conveyor.domain.model import FailureReason, ShardCounters
from conveyor.domain.run.settlement import BACKOFF
from conveyor.domain.run.wait_reason import WaitReason
from conveyor.schemas.problem_codes import PROBLEM_CODES
from tests.mutants.defects import MUTANTS
from tests.tidy import tables
from tests.tidy.generate import PARTS, documents, generated, parts_of
from tests.tidy.listings import checked
from tests.tidy.other_clients import make_clients
from tests.tidy.reference import make_reference
from tests.tidy.sources import ALL_PYTHON, ROOT, modules

SPEC_BYTES_MAX = 40_700
WRITTEN = (
    *(path for path in documents() if path.name != "hardening.md"),
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
)

_GENERATED = re.compile(r"<!-- generated: .*?<!-- end: [^>]*-->", re.DOTALL)
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
_PATH = re.compile(r"`((?:conveyor|actors|tests|bench|docs)/[\w./-]*)`")
_CONSTANT = re.compile(r"`([A-Z][A-Z0-9]*_[A-Z0-9_]+)`")
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
_PRONOUN = re.compile(r"\b(who|whoever|nobody|somebody|anybody)\b", re.IGNORECASE)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def written_text(path: Path) -> str:
    """The text of a document without its generated parts."""
    return _GENERATED.sub("", text_of(path))


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", documents(), ids=named)
def test_each_document_is_as_make_docs_generates_it(path: Path) -> None:
    text = text_of(path)

    assert generated(text) == text


def test_the_clients_of_the_sdk_are_as_make_docs_generates_them() -> None:
    clients = make_clients()

    assert clients == {path: path.read_text(encoding="utf-8") for path in clients}


def test_the_texts_and_examples_of_the_api_are_as_make_docs_generates_them() -> None:
    assert make_reference() == REFERENCE.read_text(encoding="utf-8")


def test_every_generated_part_is_in_one_document() -> None:
    used = [part for path in documents() for part in parts_of(text_of(path))]

    assert sorted(used) == sorted(PARTS)


def test_every_state_machine_has_a_diagram() -> None:
    problems = [
        name
        for name, value in vars(lifecycle).items()
        if name.isupper() and isinstance(value, dict) and not name.startswith("_")
    ]

    drawn = list(tables.DIAGRAMS.values())
    assert [name for name in problems if getattr(lifecycle, name) not in drawn] == []
    assert len(drawn) == len(problems)


def test_every_struct_within_a_row_has_a_table_of_its_fields() -> None:
    row_types = {*tables.ROWS, *tables.VALUES}

    structs = {inner for kind in row_types for inner in _structs_within(kind)}
    assert sorted(kind.__name__ for kind in structs - row_types) == []


def _structs_within(kind: type[msgspec.Struct]) -> set[type[msgspec.Struct]]:
    structs = set()
    for info in msgspec.inspect.multi_type_info([kind]):
        pending: list[object] = [info]
        while pending:
            node = pending.pop()
            if isinstance(node, msgspec.inspect.StructType):
                if node.cls is not kind:
                    structs.add(node.cls)
                    continue
                pending += [field.type for field in node.fields]
            for name in ("types", "item_types"):
                pending += getattr(node, name, ())
            for name in ("item_type", "key_type", "value_type"):
                pending += [getattr(node, name)] if hasattr(node, name) else []
    return structs


def test_the_table_of_settings_is_complete_and_has_no_others() -> None:
    (config,) = (module for module in modules("conveyor") if module.name == "conveyor/config.py")

    read = set(re.findall(r"\bCONVEYOR_[A-Z_]+\b", config.text))
    settings = set(re.findall(r"^\| `(CONVEYOR_[A-Z_]+)` \|", tables.settings(), re.MULTILINE))
    assert settings == read


def test_every_problem_code_of_the_code_is_in_the_table_of_errors() -> None:
    codes = {kind.code for kind in _family(Refused)}
    for module in modules("conveyor/usecases", "conveyor/api", "conveyor/domain"):
        codes |= set(re.findall(r"\bcode=\"([a-z_]+)\"", module.text))
        codes |= set(re.findall(r"\bKind\(\s*\d+,\s*\"([a-z_]+)\"", module.text))

    known = {name for named in PROBLEM_CODES.values() for name in named}
    assert sorted(codes - known) == []


def _family(kind: type[Refused]) -> set[type[Refused]]:
    return {kind}.union(*(_family(child) for child in kind.__subclasses__()))


def test_every_failure_reason_has_a_delay_and_a_counter() -> None:
    assert set(BACKOFF) == set(FailureReason)
    assert set(FailureReason) <= set(ShardCounters.__struct_fields__)


def test_the_runbook_has_a_remedy_for_every_wait_reason() -> None:
    rows = set(
        re.findall(
            r"^\| `(\w+)` \| .+ \|$", written_text(ROOT / "docs/operations.md"), re.MULTILINE
        )
    )
    order = written_text(ROOT / "docs/api.md")

    assert set(WaitReason) <= rows
    assert [reason for reason in WaitReason if f"`{reason}`" not in order] == []


def test_every_checked_invariant_is_in_the_specification() -> None:
    numbers = re.findall(r"^\| I(\d+) \| .+\. \|$", text_of(ROOT / "SPEC.md"), re.MULTILINE)

    stated = {int(number) for number in numbers}
    used = {number for number, _ in checked()}
    used |= {number for mutant in MUTANTS.values() for number in mutant.invariants}
    assert len(numbers) == len(stated)
    assert sorted(used - stated) == []
    assert sorted(stated - used) == []


def test_the_specification_is_below_its_size_limit() -> None:
    assert len(text_of(ROOT / "SPEC.md").encode()) <= SPEC_BYTES_MAX


@pytest.mark.parametrize("path", WRITTEN, ids=named)
def test_every_path_that_a_document_names_exists(path: Path) -> None:
    lost = [name for name in _PATH.findall(text_of(path)) if not (ROOT / name).exists()]

    assert lost == []


@pytest.mark.parametrize("path", WRITTEN, ids=named)
def test_every_constant_that_a_document_names_exists(path: Path) -> None:
    names = set(_CONSTANT.findall(written_text(path)))

    known = {word for module in modules(*ALL_PYTHON) for word in _words(module.text)}
    # These are variables of botocore and of OpenTelemetry.
    outside = {"AWS_ENDPOINT_URL"} | {name for name in names if name.startswith("OTEL_")}
    assert sorted(names - known - outside) == []


def _words(text: str) -> list[str]:
    return re.findall(r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]+\b", text)


@pytest.mark.parametrize("path", WRITTEN, ids=named)
def test_every_link_of_a_document_has_an_existing_target(path: Path) -> None:
    lost = []
    for target, anchor in _LINK.findall(_CODE.sub("", text_of(path))):
        if target.startswith("http"):
            continue
        file = (path.parent / target).resolve() if target else path
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            lost.append(f"{target}#{anchor}")

    assert lost == []


def _anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", text_of(path), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", WRITTEN, ids=named)
def test_no_sentence_of_a_document_uses_a_vague_pronoun_as_its_actor(path: Path) -> None:
    prose = _CODE.sub("", written_text(path))

    assert [line for line in prose.splitlines() if _PRONOUN.search(line)] == []
