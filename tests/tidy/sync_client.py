"""Writes the synchronous client of the SDK from the Trio client, as `make docs` does.

A coroutine becomes a function, an asynchronous generator an iterator. A client for another event
loop would be written in the same way, with a connection of its own.
"""

from __future__ import annotations

import re
import subprocess
import sys

from tests.tidy.sources import ROOT

SOURCE = ROOT / "conveyor/sdk/trio_client.py"
TARGET = ROOT / "conveyor/sdk/client.py"

_DOCSTRING = '''"""The synchronous client: one method for each operation of the API.

`make docs` writes this file from trio_client.py. Do not change it by hand.
"""
'''
_REPLACEMENTS = (
    (r'\A""".*?"""\n', _DOCSTRING),
    (r"\basync (def|for|with)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\bAsyncGenerator\[(\w+), None\]", r"Iterator[\1]"),
    (r"\bAsyncGenerator\b", "Iterator"),
    (r"\b[Tt]rio_?(?=[Cc]onnection\b|Client\b)", ""),
    (r"for (\w+) in ([\w.]+):\n +yield \1\n", r"yield from \2\n"),
)


def make_sync_client() -> str:
    """Returns the text of the synchronous client."""
    text = SOURCE.read_text(encoding="utf-8")
    for pattern, replacement in _REPLACEMENTS:
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    return _run_ruff(_run_ruff(text, "check", "--fix", "--select", "I"), "format")


def _run_ruff(text: str, *command: str) -> str:
    ruff = [sys.executable, "-m", "ruff", *command, "--quiet", "--stdin-filename", str(TARGET), "-"]
    return subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
