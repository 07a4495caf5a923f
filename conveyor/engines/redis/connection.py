"""CoredisConnection: the way to one Redis, a single server or a cluster (docs/engines.md, Redis).

Which of the two it is, is asked at the first contact, so that a program starts while it is away.
Deadlines and the translation of errors live here, once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from hashlib import sha1
from importlib.resources import files
from typing import Any, NoReturn, Protocol

import anyio
import coredis
import msgspec
import trio
from coredis.exceptions import (
    ClusterCrossSlotError,
    CommandSyntaxError,
    DataError,
    NoScriptError,
    RedisError,
    UnknownCommandError,
    WrongTypeError,
)
from coredis.response.types import PubSubMessage
from coredis.retry import NoRetryPolicy

from conveyor.domain.ids import JobId, RunId
from conveyor.ports.errors import Unavailable

log = logging.getLogger(__name__)

DEADLINE_S = 2.0

# What only a mistake of ours can bring about. The rest is the world's doing.
_BUGS = (
    ClusterCrossSlotError,
    CommandSyntaxError,
    DataError,
    UnknownCommandError,
    WrongTypeError,
)
# What breaks when a connection does; the last two are what coredis has underneath.
_TRANSIENT = (RedisError, OSError, anyio.BrokenResourceError, anyio.ClosedResourceError)

Client = coredis.Redis[str] | coredis.RedisCluster[str]
Note = Callable[[str], None]


def no_op(command: str) -> None:
    """Nobody counts."""


class Script:
    """A script of ours, by name; `sha` is what a server that has seen it calls it."""

    def __init__(self, name: str) -> None:
        self.name = name
        folder = files("conveyor.engines.redis") / "scripts"
        parts = [
            (folder / f"{part}.lua").read_text(encoding="utf-8") for part in ("_prelude", name)
        ]
        self.text = "".join(parts)
        self.sha = sha1(self.text.encode(), usedforsecurity=False).hexdigest()


class RedisConnection(Protocol):
    """What is asked of a Redis. Raises what `translating` knows how to read."""

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[str | int]) -> Any:
        """What the script answers."""

    async def get(self, key: str) -> str | None: ...

    async def put(self, key: str, text: str, *, ttl_s: float) -> None: ...

    async def drop(self, key: str, members: Sequence[str]) -> None: ...

    async def publish(self, channel: str, text: str) -> None: ...

    def subscribe(
        self, channel: str
    ) -> AbstractAsyncContextManager[AsyncIterator[Mapping[str, Any]]]:
        """What is published from now on, until the connection breaks."""


class CoredisConnection:
    """`note` is told of every command, by name."""

    def __init__(
        self,
        url: str,
        nursery: trio.Nursery,
        plain: coredis.Redis[str],
        note: Note,
    ) -> None:
        self._url = url
        self._note = note
        self._nursery = nursery
        self._plain = plain
        self._client: Client | None = None
        self._meeting = trio.Lock()

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[str | int]) -> Any:
        """A server that has not seen the script is shown it."""
        client = await self._client_for(script.name)
        try:
            return await client.evalsha(script.sha, keys, args)
        except NoScriptError:
            self._note(script.name)
            return await client.eval(script.text, keys, args)

    async def get(self, key: str) -> str | None:
        return await (await self._client_for("get")).get(key)

    async def put(self, key: str, text: str, *, ttl_s: float) -> None:
        await (await self._client_for("set")).set(key, text, px=int(ttl_s * 1000))

    async def drop(self, key: str, members: Sequence[str]) -> None:
        await (await self._client_for("zrem")).zrem(key, members)

    async def publish(self, channel: str, text: str) -> None:
        await (await self._client_for("publish")).publish(channel, text)

    @asynccontextmanager
    async def subscribe(self, channel: str) -> AsyncGenerator[AsyncIterator[PubSubMessage], None]:
        client = await self._get_client()
        subscription = client.pubsub(
            channels=[channel], ignore_subscribe_messages=True, retry_policy=NoRetryPolicy()
        )
        async with subscription as heard:
            yield heard

    async def _client_for(self, command: str) -> Client:
        client = await self._get_client()
        self._note(command)
        return client

    async def _get_client(self) -> Client:
        if self._client is None:
            async with self._meeting:
                if self._client is None:
                    self._client = await self._connect()
        return self._client

    async def _connect(self) -> Client:
        memory = await self._plain.info("memory")
        if (policy := memory.get("maxmemory_policy")) != "noeviction":
            log.warning(
                "Redis may drop leases when it is short of memory: set its policy to noeviction",
                extra={"policy": policy},
            )
        if not (await self._plain.info("cluster")).get("cluster_enabled"):
            return self._plain
        client: Client = await self._nursery.start(self._run_cluster_client)
        return client

    async def _run_cluster_client(self, task_status: trio.TaskStatus[Client]) -> None:
        # Where CONFIG is not allowed, as with hosted ones, nobody can ask for full coverage.
        client = coredis.RedisCluster.from_url(
            self._url,
            startup_nodes=[self._plain.connection_pool.location],
            skip_full_coverage_check=True,
            decode_responses=True,
        )
        async with client:
            task_status.started(client)
            await trio.sleep_forever()


@asynccontextmanager
async def open_link(url: str, note: Note = no_op) -> AsyncGenerator[CoredisConnection, None]:
    """A link that connects when it is first used."""
    async with trio.open_nursery() as nursery:
        plain = coredis.Redis.from_url(url, decode_responses=True)
        async with plain:
            yield CoredisConnection(url, nursery, plain, note)
            nursery.cancel_scope.cancel()


@contextmanager
def translating(deadline_s: float = DEADLINE_S) -> Iterator[None]:
    """One deadline for all that is done inside; whatever the world does to it is Unavailable."""
    with trio.move_on_after(deadline_s) as scope:
        try:
            yield
        except _BUGS:
            raise
        except _TRANSIENT as error:
            raise Unavailable(f"Redis: {type(error).__name__}") from error
        except BaseExceptionGroup as group:
            if group.split(_TRANSIENT)[1] is not None:
                raise
            raise Unavailable("Redis: the connection broke") from group
    if scope.cancelled_caught:
        raise Unavailable("Redis: no answer in time")


# RedisChannel: which runs have changed, told from process to process (SPEC.md 4.13).
#
# Whoever misses it finds out by looking. The truth is in the rows: this only says where to look.


LISTEN_AGAIN_S = 1.0


class _Said(msgspec.Struct, frozen=True):
    by: str
    job_id: JobId
    run_id: RunId


_DECODER = msgspec.json.Decoder(_Said)


class RedisChannel:
    """`owner` names this process, which does not hear itself."""

    def __init__(self, link: RedisConnection, *, space: str, owner: str) -> None:
        self._link = link
        self._name = f"{space}:signals"
        self._owner = owner

    async def tell(self, job_id: JobId, run_id: RunId) -> None:
        """Tells whoever listens; that nobody can be told is no failure."""
        text = msgspec.json.encode(_Said(self._owner, job_id, run_id)).decode()
        with suppress(Unavailable), translating():
            await self._link.publish(self._name, text)

    async def listen_forever(self, hear: Callable[[JobId, RunId], Awaitable[None]]) -> NoReturn:
        """Passes on what others tell."""
        while True:
            try:
                with translating(math.inf):
                    async with self._link.subscribe(self._name) as heard:
                        async for message in heard:
                            said = _DECODER.decode(str(message["data"]))
                            if said.by != self._owner:
                                await hear(said.job_id, said.run_id)
            except (Unavailable, msgspec.DecodeError) as error:
                log.warning("signals unavailable", extra={"cause": str(error)})
            await trio.sleep(LISTEN_AGAIN_S)
