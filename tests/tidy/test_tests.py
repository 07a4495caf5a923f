"""Tests are named by the rule they state, and none of them mocks our code."""

from __future__ import annotations

import ast

from tests.tidy.sources import Module, full_names, modules

WORDS_MIN = 4  # `test` is the first: `test_missing_outranks_stale` is a sentence.


def functions_in(module: Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [
        node
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    ]


def test_the_name_of_a_test_reads_as_a_sentence() -> None:
    curt = [
        f"{module.at(test)} {test.name}"
        for module in modules("tests")
        for test in functions_in(module)
        if len([word for word in test.name.split("_") if word]) < WORDS_MIN
    ]

    assert curt == []


def test_no_name_is_used_twice_in_a_file() -> None:
    doubled = [
        f"{module.name} {name}"
        for module in modules("tests")
        if module.name.rpartition("/")[2].startswith("test_")
        for names in [[test.name for test in functions_in(module)]]
        for name in sorted(set(names))
        if names.count(name) > 1
    ]

    assert doubled == []


def test_no_test_uses_a_mocking_library() -> None:
    found = [
        f"{module.at(node)} {name}"
        for module in modules("tests")
        for node, name in full_names(module)
        if name.startswith(("unittest.mock", "mock.", "pytest_mock"))
    ]

    assert found == []
