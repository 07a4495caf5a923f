"""A clock and a data directory for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"
