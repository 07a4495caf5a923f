"""Signals between processes by LISTEN and NOTIFY (docs/engines.md, Postgres engine).

A signal only makes a reaction faster. If it is lost, discovery and the sweeper find the change. So
sending never fails. A run that changed is told to all processes. An open batch is for one of them:
it is a row, which the first process that wakes removes.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

import trio

from conveyor.domain.ids import JobId, RunId
from conveyor.engines.postgres.connection import Connection, Statement
from conveyor.engines.postgres.database import Database
from conveyor.engines.postgres.errors import translated
from conveyor.ports.errors import Unavailable

log = logging.getLogger(__name__)

Hear = Callable[[JobId, RunId], Awaitable[None]]

# Finds batches whose notification was lost, and notices a connection that ended silently.
POLL_S = 5.0
# Without LISTEN this is how long a batch waits for its worker.
_POLL_ALONE_S = 1.0
# The pause after an error, so that an outage does not become a loop of connections.
_AGAIN_S = 1.0

_RUN, _BATCH = "run", "batch"
# Channels are of the whole database, tables of a schema.
_CHANNEL = "'conveyor_' || current_schema()"
_NOTIFY = f"SELECT pg_notify({_CHANNEL}, $1)"
_PUT = "INSERT INTO control_messages (job_id, run_id) VALUES ($1, $2)"
_TAKE = """
DELETE FROM control_messages WHERE message_id = (
    SELECT message_id FROM control_messages ORDER BY message_id LIMIT 1 FOR UPDATE SKIP LOCKED
) RETURNING job_id, run_id
"""


class Notifier:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def run_changed(self, job_id: JobId, run_id: RunId, tasks: int = 0) -> None:
        await self._send(run_id, Statement(_NOTIFY, (f"{_RUN} {job_id} {run_id}",)))

    async def batch_opened(self, job_id: JobId, run_id: RunId) -> None:
        put = Statement(_PUT, (job_id, run_id))
        await self._send(run_id, put, Statement(_NOTIFY, (_BATCH,)))

    async def _send(self, run_id: RunId, *statements: Statement) -> None:
        try:
            await self._database.run(*statements)
        except Unavailable as error:
            log.warning("notification not sent", extra={"run": run_id, "cause": str(error)})

    async def listen_forever(self, run_changed: Hear, batch_opened: Hear) -> NoReturn:
        """Passes signals of other processes on, forever."""
        while True:
            try:
                if self._database.has_sessions:
                    await self._listen(run_changed, batch_opened)
                else:
                    await self._take_batches(batch_opened)
                    await trio.sleep(_POLL_ALONE_S)
            except Unavailable as error:
                log.warning("signals unavailable", extra={"cause": str(error)})
                await trio.sleep(_AGAIN_S)

    async def _listen(self, run_changed: Hear, batch_opened: Hear) -> NoReturn:
        with translated():
            # A connection of its own: those of the pool serve another task each time.
            connection = await self._database.connect()
        try:
            with translated():
                ((channel,),) = (await connection.run([Statement(f"SELECT {_CHANNEL}")]))[0].rows
                await connection.listen(channel)
            while True:
                await self._take_batches(batch_opened)
                for payload in await _notifications(connection):
                    kind, *ids = payload.split(" ")
                    if kind == _RUN and len(ids) == 2:
                        await run_changed(JobId(ids[0]), RunId(ids[1]))
        finally:
            connection.close()

    async def _take_batches(self, batch_opened: Hear) -> None:
        while rows := (await self._database.write(Statement(_TAKE))).rows:
            for job_id, run_id in rows:
                await batch_opened(job_id, run_id)


async def _notifications(connection: Connection) -> list[str]:
    """Waits up to POLL_S for notifications, and checks then that the server still answers."""
    payloads: list[str] = []
    with translated():
        with trio.move_on_after(POLL_S):
            payloads = await connection.notifications()
        if not payloads:
            with trio.fail_after(POLL_S):
                await connection.run([Statement("SELECT 1")])
    return payloads
