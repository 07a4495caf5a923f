"""Maintenance of an installation: what it lacks, and backups of the embedded engine
(docs/deploy.md, Check a deployment; Backup and restore)."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

from conveyor.bootstrap.runtime import AWS, DIRECT, POSTGRES, SHARED_ENGINES, require_extra
from conveyor.config import BadSettings, Settings, is_strong_secret
from conveyor.domain import ids
from conveyor.domain.ids import Random
from conveyor.domain.submit.target import TargetPolicy
from conveyor.engines.sqlite import backup
from conveyor.engines.sqlite.backup import Manifest
from conveyor.engines.sqlite.shared_blobs import is_shared_folder
from conveyor.engines.system import SystemClock
from conveyor.http_client.connection_limits import PoolLimits
from conveyor.http_client.errors import FetchFailed
from conveyor.http_client.pool import HttpPool
from conveyor.ports.errors import Unavailable
from conveyor.schemas.responses import Finding

__all__ = ["Manifest", "back_up", "check_deployment", "restore"]

# The role that stores nothing.
GATEWAY = "gateway"
# Below this the embedded engine starts no new work (docs/operations.md, The disk is full).
_FREE_BYTES_MIN = 256 * 1024 * 1024


async def check_deployment(settings: Settings, role: str, random: Random) -> list[Finding]:
    """Returns every checked item. Items with a problem have a remedy."""
    from conveyor.bootstrap import gateway_check

    if role == GATEWAY:
        return [_check_callers(settings), *await gateway_check.check_gateway(settings)]
    findings = _check_settings(settings, role)
    findings += await gateway_check.check_remote_gateway(settings)
    if settings.engine == POSTGRES:
        return findings + await _check_postgres(settings)
    if settings.engine != AWS:
        return findings + _check_directory(settings.data_dir, "CONVEYOR_DATA_DIR")
    with require_extra(settings):
        from conveyor.engines.aws.client.auth import find_access
        from conveyor.engines.aws.client.client import RetryingAwsClient
        from conveyor.engines.aws.client.http_transport import HttpTransport
        from conveyor.engines.aws.deployment_check import DeploymentCheck, check_clock
        from conveyor.engines.aws.errors import NoResponse

    clock = SystemClock()
    try:
        access = await find_access(clock.now)
    except NoResponse as error:
        remedy = "set AWS_REGION, and give the process a role or the usual AWS variables"
        return [*findings, Finding("credentials", str(error), remedy)]
    findings.append(Finding("credentials"))
    with closing(HttpPool(TargetPolicy(allow_private=True), PoolLimits(trusts_peers=True))) as pool:
        try:
            findings.append(await check_clock(pool, await access.endpoint("dynamodb"), clock.now))
        except FetchFailed as error:
            remedy = "check the network, the endpoint and the region"
            findings.append(Finding("clock", f"DynamoDB does not answer: {error}", remedy))
        check = DeploymentCheck(
            client=RetryingAwsClient(
                transport=HttpTransport(access=access, pool=pool, now=clock.now),
                random=random,
                deadline_s=settings.aws_timeout_s,
            ),
            table=settings.table,
            bucket=settings.bucket,
            queue_prefix=settings.queue_prefix,
            probe_id=ids.mint_ulid(clock.now(), random),
        )
        findings += await check.run(role)
    findings += await _check_redis(settings)
    if settings.has_task_store:
        findings += await _check_postgres(settings)
    return findings


def _check_settings(settings: Settings, role: str) -> list[Finding]:
    secret = Finding("secret key")
    if settings.secret_key is not None and not is_strong_secret(settings.secret_key):
        secret = Finding(
            "secret key",
            "CONVEYOR_SECRET_KEY is weak",
            "use 32 random bytes, such as `openssl rand -hex 32`; an existing deployment must keep "
            "its key",
        )
    # A worker of a shared engine takes no requests.
    takes_requests = settings.engine not in SHARED_ENGINES or role == "api"
    return [secret, _check_callers(settings) if takes_requests else Finding("callers")]


def _check_callers(settings: Settings) -> Finding:
    return _require(
        settings.auth != "passthrough" or settings.gateway_url != DIRECT,
        "callers",
        "every key is accepted, and pages are fetched directly: any host that reaches the port "
        "can fetch through it",
        "set CONVEYOR_AUTH=keys with CONVEYOR_API_KEYS, or keep the port private",
    )


async def _check_redis(settings: Settings) -> list[Finding]:
    if settings.redis_url is None:
        return []
    from conveyor.engines.redis.connection import open_link, translating

    findings = []
    try:
        with translating():
            async with open_link(settings.redis_url) as link:
                await link.get("conveyor-check")
        findings.append(Finding("Redis"))
    except Unavailable as error:
        remedy = "check CONVEYOR_REDIS_URL, the security group and the TLS setting (rediss://)"
        findings.append(Finding("Redis", str(error), remedy))
    parts = urlsplit(settings.redis_url)
    if parts.scheme == "redis" and parts.hostname not in {"localhost", "127.0.0.1", "::1"}:
        problem = "the connection to Redis is not encrypted"
        findings.append(Finding("Redis TLS", problem, "use rediss:// where the server offers TLS"))
    return findings


async def _check_postgres(settings: Settings) -> list[Finding]:
    with require_extra(settings):
        from conveyor.bootstrap.postgres import config_of
        from conveyor.engines.postgres.check import check_database

    findings = await check_database(config_of(settings))
    folder = settings.postgres.blob_dir
    if folder is None:
        return findings
    if is_shared_folder(folder):
        return [*findings, *_check_directory(folder, "CONVEYOR_BLOB_DIR")]
    remedy = "mount its disk, or make it with `conveyor init`"
    return [*findings, Finding("folder of bodies", f"there is none at {folder}", remedy)]


def _check_directory(directory: Path, setting: str) -> list[Finding]:
    path = directory.resolve()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    return [
        _require(
            os.access(existing, os.W_OK | os.X_OK),
            "data directory" if setting == "CONVEYOR_DATA_DIR" else "folder of bodies",
            f"{existing} cannot be written by this user",
            f"change its owner, or choose another with {setting}",
        ),
        _require(
            shutil.disk_usage(existing).free >= _FREE_BYTES_MIN,
            "disk space",
            f"less than {_FREE_BYTES_MIN >> 20} MiB are free at {existing}",
            "delete jobs, or give the volume more room",
        ),
    ]


def _require(is_met: bool, name: str, problem: str, remedy: str) -> Finding:
    return Finding(name) if is_met else Finding(name, problem, remedy)


def back_up(settings: Settings, target: Path) -> Manifest:
    """Copies the data directory of these settings, which may be in use. Raises BackupFailed."""
    _require_embedded(settings)
    return backup.back_up(settings.data_dir, target)


def restore(settings: Settings, source: Path) -> Manifest:
    """Fills the data directory of these settings, which must be empty. Raises BackupFailed."""
    _require_embedded(settings)
    return backup.restore(source, settings.data_dir)


def _require_embedded(settings: Settings) -> None:
    if settings.engine in SHARED_ENGINES:
        raise BadSettings(
            "a backup is of a data directory: on AWS use point-in-time recovery of the table, on "
            "Postgres that of the server (docs/deploy.md, Backup and restore)"
        )
