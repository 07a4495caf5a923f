"""Modules introduce themselves, and stay small enough to be read at one sitting."""

from __future__ import annotations

import ast
import re

from tests.tidy.sources import ALL_PYTHON, modules

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70

_OPENING = re.compile(r"[A-Z`\d][^\n]*(\n[^\n]+)*?[.?](\s|\Z)")


def test_every_module_opens_with_a_sentence_that_says_what_it_is() -> None:
    mute = [
        module.name
        for module in modules(*ALL_PYTHON)
        if _OPENING.match(ast.get_docstring(module.tree) or "") is None
    ]

    assert mute == []


def test_no_file_is_longer_than_four_hundred_lines() -> None:
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
