"""Writes the synchronous and the asyncio client of the SDK from the Trio client (`make docs`).

In the synchronous client a coroutine becomes a function, an asynchronous generator an iterator. The
asyncio client has the same text with another connection.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.tidy.sources import ROOT

SDK = ROOT / "conveyor/sdk"
SOURCE = SDK / "trio_client.py"

_DOCSTRING = '''"""The {kind} client: one method for each operation of the API.

`make docs` writes this file from trio_client.py. Do not change it by hand.
"""
'''
_SYNC = (
    (r'\A""".*?"""\n', _DOCSTRING.format(kind="synchronous")),
    (r"\[(\w+) async for \1 in (.+?)\]\n", r"list(\2)\n"),
    (r"\basync (def|for|with)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\bAsyncGenerator\[(\w+), None\]", r"Iterator[\1]"),
    (r"\bAsyncGenerator\b", "Iterator"),
    (r"\b[Tt]rio_?(?=[Cc]onnection\b|Client\b)", ""),
    (r"for (\w+) in ([\w.]+):\n +yield \1\n", r"yield from \2\n"),
)
_ASYNCIO = (
    (r'\A""".*?"""\n', _DOCSTRING.format(kind="asyncio")),
    (r"\bTrio(?=Connection\b|Client\b)", "Asyncio"),
    (r"\btrio_(?=connection\b)", "asyncio_"),
)
CLIENTS: Mapping[Path, tuple[tuple[str, str], ...]] = {
    SDK / "client.py": _SYNC,
    SDK / "asyncio_client.py": _ASYNCIO,
}


def make_clients() -> dict[Path, str]:
    """Returns the texts of the clients that are written from the Trio client."""
    return {path: _make(path, replacements) for path, replacements in CLIENTS.items()}


def _make(path: Path, replacements: tuple[tuple[str, str], ...]) -> str:
    text = SOURCE.read_text(encoding="utf-8")
    for pattern, replacement in replacements:
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    sorted_text = _run_ruff(path, text, "check", "--fix", "--select", "I")
    return _run_ruff(path, sorted_text, "format")


def _run_ruff(path: Path, text: str, *command: str) -> str:
    ruff = [sys.executable, "-m", "ruff", *command, "--quiet", "--stdin-filename", str(path), "-"]
    return subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
