"""Checks what a deployment on Postgres lacks (docs/deploy.md, Check a deployment)."""

from __future__ import annotations

from conveyor.engines.postgres.connection import Statement, params_of
from conveyor.engines.postgres.database import Database, DatabaseConfig, open_database
from conveyor.engines.postgres.errors import BadDatabaseUrl, NotSetUp
from conveyor.engines.postgres.schema import check_current
from conveyor.ports.errors import Unavailable
from conveyor.schemas.responses import Finding

_VERSION_MIN = 15
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_VERIFIED = frozenset({"verify-ca", "verify-full"})


async def check_database(config: DatabaseConfig) -> list[Finding]:
    """Returns every checked item. Items with a problem have a remedy."""
    try:
        findings = [_check_tls(config)]
    except BadDatabaseUrl as error:
        return [Finding("database", str(error), "correct CONVEYOR_DATABASE_URL")]
    async with open_database(config) as database:
        try:
            findings += await _check_server(database)
            await check_current(database)
            findings.append(Finding("tables"))
        except NotSetUp as error:
            findings.append(Finding("tables", str(error), "run `conveyor init`"))
        except Unavailable as error:
            remedy = "check CONVEYOR_DATABASE_URL, the password, the network and the server"
            findings.append(Finding("database", str(error), remedy))
    return findings


async def _check_server(database: Database) -> list[Finding]:
    sql = """
        SELECT current_setting('server_version_num')::bigint / 10000,
            current_setting('synchronous_commit'), current_setting('fsync'), pg_is_in_recovery(),
            has_schema_privilege(current_schema(), 'CREATE')
    """
    ((version, commits, fsync, is_replica, may_create),) = (
        await database.read(Statement(sql))
    ).rows
    database_finding = Finding("database")
    if version < _VERSION_MIN:
        problem = f"PostgreSQL {version} is too old"
        database_finding = Finding("database", problem, f"use version {_VERSION_MIN} or newer")
    elif is_replica:
        remedy = "name the primary, or all hosts with target_session_attrs=read-write"
        database_finding = Finding("database", "the server is a replica", remedy)
    durability = Finding("durable commits")
    if "off" in {commits, fsync}:
        durability = Finding(
            "durable commits",
            "a crash of the server loses what was accepted",
            "set fsync and synchronous_commit to on",
        )
    rights = Finding("rights")
    if not may_create:
        # A long run gets a table of its own.
        remedy = "GRANT CREATE ON SCHEMA to the user of CONVEYOR_DATABASE_URL"
        rights = Finding("rights", "the user may not create tables", remedy)
    return [database_finding, durability, rights]


def _check_tls(config: DatabaseConfig) -> Finding:
    params = params_of(config.url)
    hosts = str(params.get("host") or "").split(",")
    is_local = all(not host or host.startswith("/") or host in _LOCAL for host in hosts)
    if is_local or params.get("sslmode") in _VERIFIED:
        return Finding("database TLS")
    return Finding(
        "database TLS",
        "the server's certificate is not verified",
        "add sslmode=verify-full and sslrootcert to CONVEYOR_DATABASE_URL",
    )
