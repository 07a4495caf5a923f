"""Doc comments: the `#:` comments that describe constants, fields and members of enums.

A comment is on the line of its statement, or on the lines directly above it. The documents are
generated from these texts, so a name without one is an error."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection
from types import ModuleType

import msgspec

MARK = "#: "


class Undescribed(LookupError):
    """A name that the documents show has no doc comment."""


def of_class(kind: type, *, without: Collection[str] = ()) -> dict[str, str]:
    """The description of each field or member of a class, in the order of the source, but for
    those `without` one. A struct also has the fields of the struct that it extends."""
    inherited: dict[str, str] = {}
    for base in kind.__bases__:
        if issubclass(base, msgspec.Struct) and base is not msgspec.Struct:
            inherited |= of_class(base)
    source = textwrap.dedent(inspect.getsource(kind))
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    body = [statement for statement in node.body if _assigned_name(statement) not in without]
    return inherited | _described(f"{kind.__module__}.{kind.__name__}", body, source)


def of_module(module: ModuleType) -> dict[str, str]:
    """The description of each constant of a module, in the order of the source."""
    source = inspect.getsource(module)
    return _described(module.__name__, ast.parse(source).body, source)


def _described(owner: str, body: list[ast.stmt], source: str) -> dict[str, str]:
    lines = source.splitlines()
    comments = {}
    for statement in body:
        name = _assigned_name(statement)
        if name is not None:
            text = _behind(lines, statement) or _above(lines, statement)
            if not text:
                raise Undescribed(f"{owner}.{name} has no `#:` comment")
            comments[name] = text
    return comments


def _assigned_name(statement: ast.stmt) -> str | None:
    """The public name that a statement gives a value or a type to."""
    match statement:
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
            return None if name.startswith("_") else name
        case _:
            return None


def _behind(lines: list[str], statement: ast.stmt) -> str:
    line = lines[(statement.end_lineno or statement.lineno) - 1]
    return line.partition("  " + MARK)[2].strip()


def _above(lines: list[str], statement: ast.stmt) -> str:
    words: list[str] = []
    for line in reversed(lines[: statement.lineno - 1]):
        if not line.strip().startswith(MARK):
            break
        words.insert(0, line.strip().removeprefix(MARK))
    return " ".join(words)
