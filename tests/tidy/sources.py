"""The project's own files, read once: their text, syntax trees and imported names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = ("conveyor", "actors")
ALL_PYTHON = (*CODE, "clients", "examples", "tests", "bench")

# Files that git ignores are left out; a demo leaves its pages in the folder it ran in.
_NOT_OURS = frozenset(line.strip("/") for line in (ROOT / ".gitignore").read_text().split())


@dataclass(frozen=True, slots=True)
class Module:
    """One Python file: `name` is its path from the root."""

    name: str
    text: str
    tree: ast.Module

    def at(self, node: ast.expr | ast.stmt | ast.excepthandler) -> str:
        return f"{self.name}:{node.lineno}"


@cache
def modules(*folders: str) -> tuple[Module, ...]:
    """The Python files under these folders, in order."""
    return tuple(_read(path) for folder in folders for path in _files(ROOT / folder, ".py"))


@cache
def _read(path: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    return Module(path.relative_to(ROOT).as_posix(), text, ast.parse(text))


def text_files() -> Iterator[tuple[str, str]]:
    """Every text file of the project, with its name."""
    for path in _files(ROOT, ""):
        try:
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def _files(folder: Path, suffix: str) -> Iterator[Path]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith(".") or path.name in _NOT_OURS or path.suffix == ".egg-info":
            continue
        if path.is_dir():
            yield from _files(path, suffix)
        elif path.name.endswith(suffix):
            yield path


def full_names(module: Module) -> Iterator[tuple[ast.expr, str]]:
    """Every name and attribute that comes from an import, as its dotted path."""
    known = _imports_of(module.tree)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute | ast.Name):
            dotted = _dotted_name(node)
            head, _, rest = dotted.partition(".")
            if head in known:
                yield node, f"{known[head]}.{rest}" if rest else known[head]


def _imports_of(tree: ast.Module) -> dict[str, str]:
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name if alias.asname else alias.name.partition(".")[0]
                known[alias.asname or top] = top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return known


def _dotted_name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = _dotted_name(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""
