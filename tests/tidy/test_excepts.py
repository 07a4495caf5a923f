"""Broad excepts are allowed in a few modules; elsewhere they may only clean up and raise again."""

from __future__ import annotations

import ast

import pytest

from tests.tidy.sources import CODE, modules

BROAD = frozenset({"Exception", "BaseException"})
# The supervisor, which handles crashes; isolation, which handles a crash of one item; the last
# handler of the API; and the simulator.
PLACES = (
    "actors/runtime/",
    "conveyor/api/server/app.py",
    "conveyor/api/server/server.py",
    "conveyor/simulation/process.py",
    "conveyor/simulation/suite.py",
    "conveyor/usecases/crash_isolation.py",
)


def names_in(node: ast.expr | None) -> set[str]:
    if node is None:
        return {"BaseException"}
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)} | {
        name.attr for name in ast.walk(node) if isinstance(name, ast.Attribute)
    }


def swallowing(tree: ast.Module) -> list[int]:
    """The lines where every exception is caught or suppressed and not raised again."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            if names_in(node.type) & BROAD and not _raises_again(node):
                lines.append(node.lineno)
        elif isinstance(node, ast.Call) and "suppress" in names_in(node.func):
            lines += [node.lineno for argument in node.args if names_in(argument) & BROAD]
    return lines


def _raises_again(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def test_all_exceptions_are_caught_in_the_allowed_modules_only() -> None:
    problems = [
        f"{module.name}:{line}"
        for module in modules(*CODE)
        if not module.name.startswith(PLACES)
        for line in swallowing(module.tree)
    ]

    assert problems == []


def test_no_code_catches_a_cancellation() -> None:
    problems = [
        module.at(node)
        for module in modules(*CODE)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ExceptHandler)
        and node.type is not None
        and "Cancelled" in names_in(node.type)
        and not _raises_again(node)
    ]

    assert problems == []


@pytest.mark.parametrize(
    "code",
    [
        "try: f()\nexcept Exception: log()",
        "try: f()\nexcept: pass",
        "try: f()\nexcept (ValueError, Exception) as e: raise Other from e",
        "with suppress(BaseException): f()",
        "with contextlib.suppress(Exception): f()",
    ],
)
def test_a_broad_except_is_found(code: str) -> None:
    assert len(swallowing(ast.parse(code))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "try: f()\nexcept BaseException:\n    clean()\n    raise",
        "try: f()\nexcept ValueError: pass",
    ],
)
def test_cleaning_up_and_raising_again_is_allowed(code: str) -> None:
    assert swallowing(ast.parse(code)) == []
