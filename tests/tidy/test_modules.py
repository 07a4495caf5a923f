"""Modules begin with a description and stay within the size limits."""

from __future__ import annotations

import ast
import re
from collections import Counter

import pytest

from tests.tidy.sources import ALL_PYTHON, CODE, ROOT, modules

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
FOLDER_MODULES_MAX = 20

_OPENING = re.compile(r"[A-Z`\d][^\n]*(\n[^\n]+)*?[.?](\s|\Z)")


def test_every_module_opens_with_a_sentence() -> None:
    mute = [
        module.name
        for module in modules(*ALL_PYTHON)
        if _OPENING.match(ast.get_docstring(module.tree) or "") is None
    ]

    assert mute == []


def test_no_file_is_longer_than_six_hundred_lines() -> None:
    long = {
        module.name: count
        for module in modules(*ALL_PYTHON)
        if (count := module.text.count("\n")) > FILE_LINES_MAX
    }

    assert long == {}


def test_no_function_is_longer_than_seventy_lines() -> None:
    long = {
        f"{module.at(node)} {node.name}": count
        for module in modules(*ALL_PYTHON)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (count := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    }

    assert long == {}


def test_no_folder_of_the_product_has_more_than_twenty_modules() -> None:
    counts = Counter(module.name.rpartition("/")[0] for module in modules(*CODE))

    assert counts
    assert {folder: n for folder, n in counts.items() if n > FOLDER_MODULES_MAX} == {}


@pytest.mark.parametrize("engine", ["postgres", "sqlite"])
def test_the_scripts_of_a_schema_are_numbered_without_gaps(engine: str) -> None:
    """Two changes made at the same time may have used the same number."""
    scripts = (ROOT / "conveyor" / "engines" / engine / "schema").glob("*.sql")

    numbers = sorted(int(script.name.split("_")[0]) for script in scripts)

    assert numbers == list(range(1, len(numbers) + 1))
