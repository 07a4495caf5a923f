"""Collects the modules of conveyor-client from the repository, under another name.

The source of the clients is `conveyor/sdk`. The wheel must not contain `conveyor`, which is the
package of the server: two distributions that own the same files cannot be installed side by side.
So `conveyor/sdk` becomes `conveyor_client`, each module that it imports from the rest of the
repository becomes a part of `conveyor_client/internal`, and the imports are renamed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "conveyor_client"
_SDK = "conveyor.sdk"
_OURS = ("conveyor", "actors")
_IMPORT = re.compile(r"^(\s*)(from|import) (conveyor|actors)\b([\w.]*)", re.MULTILINE)


def collect(repository: Path, target: Path) -> None:
    """Writes the package into the folder `target`."""
    for name in sorted(_find_modules(repository)):
        source = _path_of(repository, name)
        renamed = _rename(name).replace(".", "/")
        is_package = source.name == "__init__.py"
        path = target / (f"{renamed}/__init__.py" if is_package else f"{renamed}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_rename_imports(source.read_text(encoding="utf-8")), encoding="utf-8")
    package = target / PACKAGE
    root = ast.parse((repository / "conveyor/__init__.py").read_text(encoding="utf-8"))
    version = next(line for line in map(ast.unparse, root.body) if line.startswith("__version__"))
    with (package / "__init__.py").open("a", encoding="utf-8") as file:
        file.write(f"\n{version}\n")
    (package / "py.typed").touch()
    (package / "internal/__init__.py").write_text('"""Modules that the server has too."""\n')


def _find_modules(repository: Path) -> set[str]:
    """Returns the SDK and every module of the repository that it imports, also indirectly."""
    names: set[str] = set()
    rest = [_SDK]
    while rest:
        name = rest.pop()
        if name in names or not _path_of(repository, name).exists():
            continue
        names.add(name)
        rest.extend(_imports_of(_path_of(repository, name)))
        if "." in name:
            rest.append(name.rpartition(".")[0])
    return names


def _imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_OURS):
            yield str(node.module)
            # A name may be a module of the package.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _path_of(repository: Path, name: str) -> Path:
    path = repository / name.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _rename(name: str) -> str:
    if name == _SDK or name.startswith(f"{_SDK}."):
        return PACKAGE + name.removeprefix(_SDK)
    return f"{PACKAGE}.internal.{name}"


def _rename_imports(text: str) -> str:
    return _IMPORT.sub(
        lambda match: f"{match[1]}{match[2]} {_rename(match[3] + match[4])}",
        text,
    )
