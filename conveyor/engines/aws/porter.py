"""The porter answers the doorbell: a batch that was opened anywhere is walked here
(docs/engines.md, Queues on SQS)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

import trio

from conveyor.domain.ids import JobId, RunId
from conveyor.engines.aws.doorbell import Doorbell
from conveyor.ports.errors import QueueGone, Unavailable

log = logging.getLogger(__name__)

LISTEN_AGAIN_S = 1.0


async def answer_forever(
    bell: Doorbell, hear: Callable[[JobId, RunId], Awaitable[None]]
) -> NoReturn:
    """Whoever dies with a ring in hand leaves an open batch, which the sweeper finds."""
    while True:
        try:
            rings = await bell.listen()
            for ring in rings:
                await hear(ring.job_id, ring.run_id)
            await bell.answered(rings)
        except (QueueGone, Unavailable) as error:
            log.warning("the doorbell is not heard for now", extra={"cause": str(error)})
            await trio.sleep(LISTEN_AGAIN_S)
