"""A deployment on Postgres: `init`, an API and workers as processes, with a folder for bodies."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tests.e2e.cloud import Cloud
from tests.e2e.postgres_audit import violations
from tests.servers import Postgres, a_postgres


@dataclass(slots=True)
class Deployment:
    server: Postgres
    cloud: Cloud
    blob_dir: Path

    def violations(self) -> list[str]:
        return violations(self.server.url, self.blob_dir)


@contextmanager
def postgres_deployment(
    folder: Path,
    *settings: str,
    is_set_up: bool = True,
    environ_more: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Deployment]:
    """Runs a deployment with these settings of the server; by default commits are durable."""
    with a_postgres(settings) as server:
        environ = {
            **os.environ,
            "CONVEYOR_ENGINE": "postgres",
            "CONVEYOR_DATABASE_URL": server.url,
            "CONVEYOR_BLOB_DIR": str(folder / "bodies"),
            "CONVEYOR_SECRET_KEY": "between processes",
            "CONVEYOR_PORT": "0",
            "CONVEYOR_METRICS_PORT": "0",
            "CONVEYOR_ALLOW_PRIVATE_TARGETS": "on",
            **environ_more,
        }
        cloud = Cloud(environ, folder)
        if is_set_up:
            cloud.run("init")
        try:
            yield Deployment(server, cloud, folder / "bodies")
        finally:
            cloud.end()
