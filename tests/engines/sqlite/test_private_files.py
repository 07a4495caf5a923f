"""Only its user can read a data directory, whatever modes it had before."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from random import Random

import pytest

from conveyor.engines.sqlite import open_engine
from tests.builders import ManualClock, a_job, keep


def _open_to_others(data_dir: Path) -> list[str]:
    paths = [data_dir, *data_dir.rglob("*")]
    return [path.name for path in paths if path.stat().st_mode & 0o077]


@pytest.fixture(autouse=True)
def _generous_umask() -> object:
    """The umask of a service manager that sets none."""
    before = os.umask(0)
    yield
    os.umask(before)


async def test_a_directory_that_others_could_read_becomes_private(
    data_dir: Path, clock: ManualClock
) -> None:
    data_dir.mkdir(mode=0o755)

    async with open_engine(data_dir, clock=clock, random=Random(1), owner="test") as engine:
        await keep(engine.store, a_job())
        await engine.blobs.put("jobs/j/a/b", [b"body"])
        await engine.blobs.add("jobs/j/runs/r", "task.1", [b"body"])

        assert _open_to_others(data_dir) == []


async def test_readable_files_of_an_earlier_release_become_private(
    data_dir: Path, clock: ManualClock
) -> None:
    async with open_engine(data_dir, clock=clock, random=Random(1), owner="test"):
        pass
    (data_dir / "secret.key").write_text("secret")
    for path in (data_dir, *data_dir.iterdir()):
        path.chmod(0o777)

    async with open_engine(data_dir, clock=clock, random=Random(1), owner="test"):
        assert _open_to_others(data_dir) == []


async def test_the_root_of_a_volume_becomes_private_whatever_its_mode(
    data_dir: Path, clock: ManualClock
) -> None:
    data_dir.mkdir()
    data_dir.chmod(0o1777)

    async with open_engine(data_dir, clock=clock, random=Random(1), owner="test"):
        assert _open_to_others(data_dir) == []


async def test_a_directory_shared_by_all_users_keeps_its_mode(
    data_dir: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir.mkdir()
    data_dir.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(data_dir))

    async with open_engine(data_dir, clock=clock, random=Random(1), owner="test"):
        assert _open_to_others(data_dir) == ["data"]
