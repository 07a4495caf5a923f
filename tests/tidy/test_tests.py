"""Tests are named by the rule they state, and use no mocking library."""

from __future__ import annotations

import ast

from tests.tidy.sources import Module, full_names, modules

WORDS_MIN = 4  # The first word is `test`, so `test_missing_outranks_stale` counts four.


def functions_in(module: Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [
        node
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    ]


def test_the_name_of_a_test_has_enough_words_for_a_sentence() -> None:
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
    problems = [
        f"{module.at(node)} {name}"
        for module in modules("tests")
        for node, name in full_names(module)
        if name.startswith(("unittest.mock", "mock.", "pytest_mock"))
    ]

    assert problems == []


# The tests of a module are in the file of its own name and in files whose names begin with it
# (`test_webhook_keys.py` for `webhook.py`).
TESTED_FOLDERS = {"conveyor/usecases/": "tests/usecases/", "actors/": "tests/actors/"}
# Modules without such a file, and the reason.
TESTED_ELSEWHERE = {
    "actors/messages.py": "only types; each is tested with the actor that receives it",
}


def stem_of(module: Module) -> str:
    return module.name.rpartition("/")[2].removesuffix(".py")


def find_untested() -> set[str]:
    test_files = {module.name for module in modules("tests")}
    return {
        module.name
        for code, tests in TESTED_FOLDERS.items()
        for module in modules(code.rstrip("/"))
        if stem_of(module) != "__init__"
        for folder in [tests + module.name.removeprefix(code).rpartition("/")[0]]
        if f"{folder.rstrip('/')}/test_{stem_of(module)}.py" not in test_files
    }


def test_every_actor_and_use_case_has_a_test_file_of_its_own_name() -> None:
    assert find_untested() == TESTED_ELSEWHERE.keys()


def test_every_test_file_of_use_cases_begins_with_the_name_of_a_module() -> None:
    stems = {
        (module.name.removeprefix("conveyor/").rpartition("/")[0], stem_of(module))
        for module in modules("conveyor/usecases")
    }
    strangers = [
        module.name
        for module in modules("tests/usecases")
        if stem_of(module).startswith("test_")
        for folder in [module.name.removeprefix("tests/").rpartition("/")[0]]
        for name in [stem_of(module).removeprefix("test_")]
        if not any(folder == where and f"{name}_".startswith(f"{stem}_") for where, stem in stems)
    ]

    assert strangers == []
