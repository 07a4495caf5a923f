"""What an operator is told of a database that cannot be used."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from random import Random

import pytest

from conveyor.engines.postgres.check import check_database
from conveyor.engines.postgres.database import DatabaseConfig, open_database
from conveyor.engines.postgres.errors import BadDatabaseUrl
from conveyor.engines.postgres.schema import check_current, migrate
from conveyor.engines.sqlite.shared_blobs import (
    FolderUnusable,
    make_shared_folder,
    open_shared_blobs,
)
from conveyor.ports.errors import Unavailable
from tests.builders import ManualClock
from tests.postgres import execute
from tests.servers import Postgres


@pytest.mark.parametrize(
    "url",
    [
        "mysql://me:hunter2@127.0.0.1/shop",
        "postgresql://me:hunter2%zz@127.0.0.1/shop",
        'postgresql://me:hunter2"@[::1/shop',
        "host=127.0.0.1 password=hunter2 hunter2",
        "postgresql://me:hunter2@127.0.0.1/shop?sslmod=require",
    ],
)
async def test_a_url_that_cannot_be_read_is_refused_without_its_password(url: str) -> None:
    config = DatabaseConfig(url=url)

    async with open_database(config) as database:
        with pytest.raises(BadDatabaseUrl) as refusal:
            await migrate(database)
    (finding,) = await check_database(config)

    assert finding.problem is not None
    assert finding.problem == str(refusal.value)
    assert "CONVEYOR_DATABASE_URL cannot be read" in finding.problem
    assert "hunter2" not in finding.problem
    assert ('"sslmod"' in finding.problem) == ("sslmod=" in url)


async def test_a_host_without_an_address_is_named() -> None:
    config = DatabaseConfig(url="postgresql://me@no-such-host.invalid/shop")

    async with open_database(config) as database:
        with pytest.raises(Unavailable, match=r"no address of the host no-such-host\.invalid"):
            await migrate(database)


async def test_a_password_file_that_is_missing_is_named(url: str, tmp_path: Path) -> None:
    config = DatabaseConfig(url=url, password_file=tmp_path / "none")

    async with open_database(config) as database:
        with pytest.raises(Unavailable, match="CONVEYOR_DATABASE_PASSWORD_FILE cannot be read"):
            await migrate(database)


async def test_a_user_without_rights_is_told_where_they_are_listed(
    server: Postgres, url: str
) -> None:
    await execute(server.url, "CREATE ROLE guest LOGIN")
    schema = re.search(r"search_path%3D(\w+)", url)
    assert schema is not None
    config = DatabaseConfig(url=url.replace("conveyor@", "guest@"))
    try:
        for right in ("", f"GRANT USAGE ON SCHEMA {schema[1]} TO guest"):
            if right:
                await execute(server.url, right)
            async with open_database(config) as database:
                with pytest.raises(Unavailable, match=r"docs/deploy\.md") as refusal:
                    await migrate(database)
            assert "LINE" not in str(refusal.value)
        found = {finding.name: finding for finding in await check_database(config)}
    finally:
        await execute(server.url, "DROP OWNED BY guest", "DROP ROLE guest")

    assert found["rights"].remedy.startswith("GRANT CREATE ON SCHEMA")
    assert "permission denied" in (found["database"].problem or "")


async def test_the_owner_of_the_tables_has_all_rights(url: str) -> None:
    found = {finding.name: finding for finding in await check_database(DatabaseConfig(url=url))}

    assert not found["rights"].problem
    async with open_database(DatabaseConfig(url=url)) as database:
        await check_current(database)


async def test_only_a_process_that_may_make_the_folder_of_bodies_makes_it(
    clock: ManualClock, tmp_path: Path
) -> None:
    folder = tmp_path / "bodies"
    folder.mkdir()  # A mount point without its disk.
    open_folder = partial(open_shared_blobs, folder, clock=clock, random=Random(1), owner="here")

    with pytest.raises(FolderUnusable, match="CONVEYOR_BLOB_DIR"):
        async with open_folder(makes=False):
            pass
    assert list(folder.iterdir()) == []
    async with open_folder(makes=True):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(FolderUnusable, match="cannot be used: Not a directory"):
        await make_shared_folder(tmp_path / "file", now=0.0)
    async with open_folder(makes=False) as blobs:
        await blobs.put("a", [b"body"])
