"""Toy actors that crash or finish on command and record their starts and ends in a journal."""

from __future__ import annotations

import trio
from trio.testing import wait_all_tasks_blocked

from actors.runtime import Child, DynamicSupervisor, Intensity, Policy, Supervisor

PROMPT = Intensity(restarts_max=3, within_s=60.0, backoff_s=0.0)


class Boom(Exception):
    """The error that a puppet crashes with."""


class Puppet:
    """Writes `+name` when it starts and `-name` when it has ended."""

    def __init__(self, name: str, journal: list[str]) -> None:
        self.name = name
        self.journal = journal
        self._orders, self._inbox = trio.open_memory_channel[BaseException | None](100)

    async def run(self) -> None:
        self.journal.append(f"+{self.name}")
        try:
            order = await self._inbox.receive()
            if order is not None:
                raise order
        finally:
            self.journal.append(f"-{self.name}")

    async def crash(self, error: BaseException | None = None) -> None:
        """Crashes, and lets every task react that can do so without time passing."""
        self._orders.send_nowait(error or Boom(self.name))
        await wait_all_tasks_blocked()

    async def finish(self) -> None:
        self._orders.send_nowait(None)
        await wait_all_tasks_blocked()

    def child(self, restart: Policy = Policy.PERMANENT, intensity: Intensity = PROMPT) -> Child:
        return Child(self.name, run=self.run, restart=restart, intensity=intensity)


class Lingerer:
    """Shields its clean-up for some seconds, even beyond its grace."""

    def __init__(self, name: str, journal: list[str], *, lingers_s: float) -> None:
        self.name = name
        self.journal = journal
        self.lingers_s = lingers_s

    async def run(self) -> None:
        self.journal.append(f"+{self.name}")
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(self.lingers_s)
            self.journal.append(f"-{self.name}")

    def child(self, *, stop_grace_s: float) -> Child:
        return Child(self.name, run=self.run, stop_grace_s=stop_grace_s)


def puppets(names: str, journal: list[str]) -> dict[str, Puppet]:
    return {name: Puppet(name, journal) for name in names}


def states(supervisor: Supervisor | DynamicSupervisor) -> dict[str, str]:
    return {record.child.name: record.state.value for record in supervisor.records()}
