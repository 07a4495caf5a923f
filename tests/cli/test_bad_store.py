"""A start on a store that cannot be used: a sentence, exit 2 and no traceback, for every role."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from random import Random

import pytest
import trio

from conveyor.engines.sqlite import open_engine
from conveyor.engines.system import AesSecretBox, SystemClock, check_secret
from tests.attack.volume import small_volume
from tests.cli.program import Program
from tests.cli.test_bad_input import assert_refused

pytestmark = pytest.mark.slow


async def _make(data_dir: Path) -> None:
    async with open_engine(data_dir, clock=SystemClock(), random=Random(1), owner="test"):
        pass


@pytest.fixture
def data_dir(program: Program) -> Path:
    """A store that was used before."""
    program.write("list.txt", "https://example.com/")
    data_dir = program.folder / "store"
    trio.run(_make, data_dir)
    return data_dir


def _settings(data_dir: Path) -> dict[str, str]:
    return {"CONVEYOR_DATA_DIR": str(data_dir), "CONVEYOR_PORT": "0", "CONVEYOR_LOG": "text"}


def test_a_damaged_database_is_named(program: Program, data_dir: Path) -> None:
    with (data_dir / "conveyor.db").open("r+b") as file:
        file.write(b"\xff" * 4096)

    ended = program.run("dev", **_settings(data_dir))

    assert_refused(ended, str(data_dir / "conveyor.db"), "damaged", "backup")


@pytest.mark.parametrize("role", ["dev", "worker"])
def test_another_secret_key_is_refused(program: Program, data_dir: Path, role: str) -> None:
    check_secret(data_dir, AesSecretBox(b"k" * 32))

    ended = program.run(role, **_settings(data_dir), CONVEYOR_SECRET_KEY="another")

    assert_refused(ended, "another secret key", "CONVEYOR_SECRET_KEY")


def test_a_lost_secret_key_is_not_made_anew(program: Program, data_dir: Path) -> None:
    check_secret(data_dir, AesSecretBox(b"k" * 32))

    assert_refused(program.run("dev", **_settings(data_dir)), "secret.key is missing")

    assert not (data_dir / "secret.key").exists()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="needs mount")
def test_a_disk_without_any_room_is_named(program: Program) -> None:
    program.write("list.txt", "https://example.com/")
    data_dir = program.folder / "small"
    with small_volume(data_dir, 1):
        (data_dir / "filler").write_bytes(bytes(1024 * 1024 - 4096 * 8))
        ended = program.run("dev", **_settings(data_dir))

    assert ended.code == 2, ended
    assert "the disk is full" in ended.err
