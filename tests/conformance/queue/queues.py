"""The table of queues that the laws are tested with: one of every engine, and SQS on an
emulator."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random

from conveyor.engines.aws.sqs import SqsQueue
from conveyor.engines.system import SystemClock
from conveyor.ports.clock import Clock
from conveyor.ports.queue import Queue
from tests.aws import an_access, an_aws_client, an_http_transport
from tests.conformance.engines import ENGINES

_NUMBERS = itertools.count()


@asynccontextmanager
async def _of_engine(name: str, data_dir: Path, clock: Clock) -> AsyncIterator[Queue]:
    async with ENGINES[name](data_dir, clock, Random(1)) as engine:
        yield engine.queue


@asynccontextmanager
async def _open_emulator(url: str) -> AsyncIterator[Queue]:
    """Queues with a prefix of their own, because all tests share the server and their run ids."""
    async with an_http_transport(an_access(sqs=url)) as transport:
        prefix = f"test-{next(_NUMBERS)}-"
        clock = SystemClock()
        yield SqsQueue(
            client=an_aws_client(transport), clock=clock, random=Random(1), prefix=prefix
        )


QUEUES: dict[str, Callable[[Path, Clock], AbstractAsyncContextManager[Queue]]] = {
    name: partial(_of_engine, name) for name in ENGINES
}
TIMELESS: dict[str, Callable[[str], AbstractAsyncContextManager[Queue]]] = {"sqs": _open_emulator}
