"""CoredisConnection: connects to one Redis, a single server or a cluster (docs/engines.md, Redis).

The connection finds out which of the two it is at the first contact, so that a process can start
while Redis is unavailable. Deadlines and the translation of errors are only in this module.
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
from dataclasses import dataclass
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

from conveyor.domain.ids import JobId, LeaseId, Random, RunId
from conveyor.ports.coordinator import HostPool
from conveyor.ports.errors import Unavailable

log = logging.getLogger(__name__)

# The time of a call in all. A longer deadline delays the fallback coordinator while Redis is away.
DEADLINE_S = 2.0

# Errors that only a bug of this program can cause. All other errors are of the environment.
_BUGS = (
    ClusterCrossSlotError,
    CommandSyntaxError,
    DataError,
    UnknownCommandError,
    WrongTypeError,
)
# Errors of a broken connection. The last two come from anyio, which coredis uses.
_TRANSIENT = (RedisError, OSError, anyio.BrokenResourceError, anyio.ClosedResourceError)

Client = coredis.Redis[str] | coredis.RedisCluster[str]
Note = Callable[[str], None]


def no_op(command: str) -> None:
    """The default `note`: counts nothing."""


class Script:
    """A Lua script of this package. `sha` is the digest by which a server calls a known script."""

    def __init__(self, name: str) -> None:
        self.name = name
        folder = files("conveyor.engines.redis") / "scripts"
        parts = [
            (folder / f"{part}.lua").read_text(encoding="utf-8") for part in ("_prelude", name)
        ]
        self.text = "".join(parts)
        self.sha = sha1(self.text.encode(), usedforsecurity=False).hexdigest()


class RedisConnection(Protocol):
    """The commands that this engine uses. Raises the errors that `translating` translates."""

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[str | int]) -> Any:
        """Runs a script and returns its result."""

    async def get(self, key: str) -> str | None: ...

    async def put(self, key: str, text: str, *, ttl_s: float) -> None: ...

    async def drop(self, key: str, members: Sequence[str]) -> None: ...

    async def publish(self, channel: str, text: str) -> None: ...

    def subscribe(
        self, channel: str
    ) -> AbstractAsyncContextManager[AsyncIterator[Mapping[str, Any]]]:
        """Yields the messages that are published from now on, until the connection breaks."""


class CoredisConnection:
    """`note` is called with the name of every command."""

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
        """Calls a script by its digest, and sends its text only if the server does not know it.

        A server forgets its scripts at a restart or failover, so NoScriptError may come any time.
        """
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
        # No retries inside coredis: `listen_forever` subscribes again itself.
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
            # One task makes the first contact. The others wait and then find its client.
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
        # Hosted servers often forbid CONFIG, and coredis needs it for the coverage check.
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
    """Opens a connection that connects at its first use."""
    async with trio.open_nursery() as nursery:
        plain = coredis.Redis.from_url(url, decode_responses=True)
        async with plain:
            yield CoredisConnection(url, nursery, plain, note)
            nursery.cancel_scope.cancel()


@contextmanager
def translating(deadline_s: float = DEADLINE_S) -> Iterator[None]:
    """Bounds the block by one deadline, and translates errors of the environment to Unavailable."""
    with trio.move_on_after(deadline_s) as scope:
        try:
            yield
        except _BUGS:
            raise
        except _TRANSIENT as error:
            raise Unavailable(f"Redis: {type(error).__name__}") from error
        except BaseExceptionGroup as group:
            # A nursery inside coredis may raise several errors at once. They are translated only if
            # all of them are of the environment.
            if group.split(_TRANSIENT)[1] is not None:
                raise
            raise Unavailable("Redis: the connection broke") from group
    if scope.cancelled_caught:
        raise Unavailable("Redis: no answer in time")


# RedisChannel: processes notify one another of changed runs (SPEC.md 4.13).
#
# A signal is not authoritative: the rows are. A process that misses one finds the change when it
# reads the row the next time.


# The pause after a broken subscription, so that an outage does not become a busy loop.
LISTEN_AGAIN_S = 1.0


class _Said(msgspec.Struct, frozen=True):
    by: str
    job_id: JobId
    run_id: RunId
    tasks: int = 0


_DECODER = msgspec.json.Decoder(_Said)


class RedisChannel:
    """`owner` names this process, which ignores its own signals."""

    def __init__(self, link: RedisConnection, *, space: str, owner: str) -> None:
        self._link = link
        self._name = f"{space}:signals"
        self._owner = owner

    async def tell(self, job_id: JobId, run_id: RunId, tasks: int = 0) -> None:
        """Publishes a signal. A signal that cannot be sent is not an error."""
        text = msgspec.json.encode(_Said(self._owner, job_id, run_id, tasks)).decode()
        with suppress(Unavailable), translating():
            await self._link.publish(self._name, text)

    async def listen_forever(
        self, hear: Callable[[JobId, RunId, int], Awaitable[None]]
    ) -> NoReturn:
        """Passes the signals of other processes to `hear`, forever."""
        while True:
            try:
                # No deadline: a subscription waits as long as there is no signal.
                with translating(math.inf):
                    async with self._link.subscribe(self._name) as heard:
                        async for message in heard:
                            said = _DECODER.decode(str(message["data"]))
                            if said.by != self._owner:
                                await hear(said.job_id, said.run_id, said.tasks)
            except (Unavailable, msgspec.DecodeError) as error:
                log.warning("signals unavailable", extra={"cause": str(error)})
            await trio.sleep(LISTEN_AGAIN_S)


# Names of leases and keys (docs/storage.md, Redis keys).
#
# The name of a lease contains its pool: `<job>/<host>/<run>/<token>`. The host is empty for a lease
# of a job, and the run is empty for a lease of a host pool. Keys that one script uses together
# share a hash tag, because a cluster requires them to be in one slot.


def new_token(random: Random) -> str:
    return f"{random.getrandbits(96):024x}"


def lease_name(job_id: JobId, run_id: RunId, token: str) -> LeaseId:
    return LeaseId(f"{job_id}//{run_id}/{token}")


def host_lease_name(pool: HostPool, token: str) -> LeaseId:
    return LeaseId(f"{pool.name}//{token}")


def is_lease_name(lease_id: LeaseId) -> bool:
    return lease_id.count("/") == 3


def pool_name(lease_id: LeaseId) -> str:
    """Returns the job, or the name of the host pool."""
    job_id, host, _ = lease_id.split("/", 2)
    return f"{job_id}/{host}" if host else job_id


def member_name(lease_id: LeaseId) -> str:
    """Returns the name of a lease within its pool."""
    return lease_id.split("/", 2)[2]


def run_of(lease_id: LeaseId) -> str:
    return lease_id.split("/", 3)[2]


@dataclass(frozen=True, slots=True)
class Keys:
    """`space` separates deployments that share a server."""

    space: str

    def pool(self, name: str) -> str:
        """Returns the key of a job's pool or of a host pool, whose name begins with the job."""
        return f"{self._tag(name)}:leases"

    def next_at(self, pool: HostPool) -> str:
        return f"{self._tag(pool.name)}:next"

    def job_of(self, run_id: RunId) -> str:
        return f"{self._tag(run_id)}:job"

    def marks(self, subject: str) -> str:
        return f"{self._tag(subject)}:marks"

    def cached(self, name: str) -> str:
        return f"{self._tag(name)}:cached"

    def _tag(self, name: str) -> str:
        tag, _, rest = name.partition("/")
        return f"{self.space}:{{{tag}}}/{rest}"
