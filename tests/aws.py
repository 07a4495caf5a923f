"""Planes and seams for tests of the AWS engine, over the servers that stand in for AWS."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from random import Random

from conveyor.domain.addresses import TargetPolicy
from conveyor.engines.aws.boto import open_boto_plane
from conveyor.engines.aws.credentials import Access, GivenAccess
from conveyor.engines.aws.dynamo import create_table
from conveyor.engines.aws.dynamo.layout import TTL
from conveyor.engines.aws.dynamo.table import Table
from conveyor.engines.aws.engine import AwsEngine, Names, engine_on, make_ready
from conveyor.engines.aws.metering import Meter
from conveyor.engines.aws.plane import LeanPlane
from conveyor.engines.aws.seam import CrashPoint, Faults, LayeredSeam, Plane
from conveyor.engines.aws.signing import Credentials
from conveyor.net.pool import HttpPool
from conveyor.net.slots import PoolLimits
from conveyor.ports.clock import Clock
from conveyor.simulation.models import AwsModel
from tests.servers import ACCESS_KEY, SECRET_KEY

REGION = "us-east-1"
# Local servers on a busy machine may take longer than AWS ever does.
CALL_TIMEOUT_S = 60.0

OpenPlane = Callable[[Access], AbstractAsyncContextManager[Plane]]


def an_access(**endpoints: str) -> GivenAccess:
    return GivenAccess(REGION, Credentials(ACCESS_KEY, SECRET_KEY), endpoints)


@asynccontextmanager
async def a_lean_plane(access: Access) -> AsyncGenerator[LeanPlane, None]:
    pool = HttpPool(TargetPolicy(allow_private=True), PoolLimits(trusts_peers=True))
    try:
        yield LeanPlane(access=access, pool=pool, now=time.time)
    finally:
        pool.close()


PLANES: dict[str, OpenPlane] = {"lean": a_lean_plane, "boto": open_boto_plane}


def a_seam(
    plane: Plane,
    *,
    faults: Faults | None = None,
    crash: CrashPoint | None = None,
    deadline_s: float = CALL_TIMEOUT_S,
) -> LayeredSeam:
    """A seam with a meter of its own, which sees the bytes where the plane counts them."""
    meter = Meter(traffic=plane.traffic) if isinstance(plane, LeanPlane) else Meter()
    return LayeredSeam(
        plane=plane,
        random=Random(1),
        meter=meter,
        faults=faults,
        crash=crash,
        deadline_s=deadline_s,
    )


async def a_modelled_engine(
    model: AwsModel, names: Names, *, clock: Clock, random: Random
) -> AwsEngine:
    """All of the AWS engine over a model; nothing expires, as in `a_table`."""
    seam = LayeredSeam(plane=model, random=random, meter=Meter())
    await make_ready(seam, names, region=REGION)
    await _keep_rows(seam, names.table)
    return await engine_on(seam, model, names, clock=clock, random=random)


async def a_table(seam: LayeredSeam, name: str) -> Table:
    """A table from which nothing expires: the server goes by the clock on the wall, tests by T0."""
    await create_table(seam, name)
    await _keep_rows(seam, name)
    assert seam.meter is not None
    # Tokens of transactions are drawn at random, and the server remembers those of all tables.
    return Table(name=name, seam=seam, random=Random(), meter=seam.meter)


async def _keep_rows(seam: LayeredSeam, table: str) -> None:
    expiry = {"AttributeName": TTL, "Enabled": False}
    await seam.call(
        "dynamodb", "UpdateTimeToLive", {"TableName": table, "TimeToLiveSpecification": expiry}
    )
