"""Charts: the series of runs as bars of an SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conveyor.ui.client import LocalClient
from conveyor.ui.visit import Visit


async def of_run(client: LocalClient, ids: Mapping[str, str]) -> Any:
    return None


async def of_jobs(visit: Visit, job_ids: Sequence[str]) -> Any:
    return None
