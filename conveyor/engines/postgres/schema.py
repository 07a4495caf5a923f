"""The schema: numbered scripts, applied in order, each once (docs/storage.md, Postgres tables).

Several processes may migrate at the same time: an advisory lock lets one after the other do it. A
process works with a newer schema than its own, because scripts only add, so that old and new
processes run side by side while a release is rolled out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from psycopg.errors import Error

from conveyor.engines.postgres.connection import BEGIN, COMMIT, Connection, Statement
from conveyor.engines.postgres.database import Database
from conveyor.engines.postgres.errors import UNDEFINED_TABLE, NotSetUp, translated

_SCRIPTS = Path(__file__).with_name("schema")
# Any number that no other program uses for an advisory lock of this database.
_LOCK = 0x436F6E76
_VERSIONS = """
CREATE TABLE IF NOT EXISTS schema_versions (
    version bigint PRIMARY KEY,
    applied_at timestamptz NOT NULL DEFAULT now()
)
"""
_NEWEST = "SELECT coalesce(max(version), 0) FROM schema_versions"


async def migrate(database: Database, scripts: Mapping[int, str] | None = None) -> int:
    """Brings the schema up to date. Returns its version."""
    scripts = load_scripts() if scripts is None else scripts
    with translated():
        connection = await database.connect()
        try:
            # One transaction for all scripts: after a crash there is the old schema or the new one.
            lock = Statement(f"SELECT pg_advisory_xact_lock({_LOCK})")
            settings = Statement("SET LOCAL lock_timeout = 0")
            timeout = Statement("SET LOCAL statement_timeout = 0")
            await connection.run([BEGIN, settings, timeout, lock, Statement(_VERSIONS)])
            version = await _version(connection)
            for number, script in sorted(scripts.items()):
                if number > version:
                    await connection.run(
                        [
                            *map(Statement, _statements(script)),
                            Statement(f"INSERT INTO schema_versions VALUES ({number})"),
                        ]
                    )
            version = await _version(connection)
            await connection.run([COMMIT])
        finally:
            connection.close()
    return version


async def check_current(database: Database) -> None:
    """Raises NotSetUp if the schema is older than this program needs."""
    newest = max(load_scripts())
    try:
        answer = await database.read(Statement(_NEWEST))
    except Error as error:
        if error.sqlstate != UNDEFINED_TABLE:
            raise
        raise NotSetUp("the database has no tables of Conveyor: run `conveyor init`") from None
    ((version,),) = answer.rows
    if version < newest:
        raise NotSetUp(
            f"the database has schema version {version}, this Conveyor needs {newest}: "
            "run `conveyor init`"
        )


async def _version(connection: Connection) -> int:
    ((version,),) = (await connection.run([Statement(_NEWEST)]))[0].rows
    return int(version)


def load_scripts() -> dict[int, str]:
    """Returns the scripts by number, in order."""
    scripts = sorted(_SCRIPTS.glob("*.sql"))
    numbers = [int(script.name.split("_")[0]) for script in scripts]
    assert numbers == list(range(1, len(scripts) + 1)), numbers
    return {
        number: script.read_text(encoding="utf-8")
        for number, script in zip(numbers, scripts, strict=True)
    }


def _statements(script: str) -> list[str]:
    """Splits a script: in pipeline mode each statement is sent by itself. A statement ends with a
    semicolon at the end of a line; bodies of functions are indented."""
    lines = [line for line in script.splitlines() if not line.startswith("--")]
    statements: list[str] = [""]
    for line in lines:
        statements[-1] += line + "\n"
        if line.endswith(";") and not line.startswith((" ", "\t")):
            statements.append("")
    return [statement for statement in statements if statement.strip()]
