"""Fixtures: the program in a new folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.program import Program


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path, {"CONVEYOR_ALLOW_PRIVATE_TARGETS": "1"})
