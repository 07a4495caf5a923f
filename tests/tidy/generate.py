"""`python -m tests.tidy.generate`: writes the parts of the documents that repeat the code, two
clients of the SDK, and the words and examples of the OpenAPI document.

A part stands between `<!-- generated: NAME -->` and `<!-- end: NAME -->`. Everything else in a
document is written by hand. `tests/tidy/test_documents.py` compares.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from conveyor.api.server.openapi import REFERENCE
from tests.tidy import listings, tables
from tests.tidy.other_clients import make_clients
from tests.tidy.reference import make_reference
from tests.tidy.sources import ROOT

PARTS: Mapping[str, Callable[[], str]] = {
    "checkers": listings.checker_table,
    "commands": listings.commands,
    "diagrams": tables.diagrams,
    "events": tables.event_types,
    "failure reasons": tables.failure_reasons,
    "faults": listings.faults,
    "job fields": tables.job_fields,
    "laws": listings.laws,
    "limits": tables.limits_table,
    "log lines": listings.log_lines,
    "mcp tools": listings.mcp_tools,
    "metrics": listings.metrics,
    "mutants": listings.mutants,
    "packages": listings.packages,
    "parameters": tables.params,
    "problems": tables.problems,
    "profiles": listings.profiles,
    "queries": listings.query_table,
    "quotas": tables.quota_table,
    "routes": tables.routes,
    "row kinds": tables.row_kinds,
    "rows": tables.rows,
    "run failures": tables.run_failures,
    "scrape options": listings.scrape_options,
    "settings": tables.settings,
    "shown waits": tables.shown_waits,
    "task fields": tables.task_fields,
    "transitions": tables.transitions,
    "values": tables.values,
    "wait reasons": tables.wait_reasons,
}
_PART = re.compile(r"<!-- generated: (.+?) -->\n(.*?)<!-- end: \1 -->", re.DOTALL)


def documents() -> list[Path]:
    """Every document that may hold generated parts."""
    return [ROOT / "SPEC.md", ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def parts_of(text: str) -> list[str]:
    """The names of the generated parts in a document."""
    return [name for name, _ in _PART.findall(text)]


def generated(text: str) -> str:
    """The document with every generated part as the code has it now."""
    return _PART.sub(lambda match: _part(match[1]), text)


def _part(name: str) -> str:
    return f"<!-- generated: {name} -->\n\n{PARTS[name]()}\n\n<!-- end: {name} -->"


def main() -> None:
    """Writes every file that has changed, and prints its name."""
    for path in documents():
        _write(path, generated(path.read_text(encoding="utf-8")))
    for path, text in make_clients().items():
        _write(path, text)
    _write(REFERENCE, make_reference())


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
