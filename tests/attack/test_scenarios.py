"""Runs every attack at its short size, in a separate network namespace where possible."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attack.scenarios import SCENARIOS

pytestmark = pytest.mark.slow

# The longest attack takes a minute on an idle machine.
DEADLINE_S = 600
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", SCENARIOS)
def test_an_attack_stays_within_its_bounds(name: str) -> None:
    command = [sys.executable, "-m", "tests.attack", name, "--json"]
    environ = {key: value for key, value in os.environ.items() if "CONVEYOR_" not in key}

    ended = subprocess.run(
        command,
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )

    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    figures = [figure for line in lines for figure in line["figures"]]
    assert figures, ended.stderr[-2000:]
    assert [figure for figure in figures if not figure["holds"]] == []
