"""Resolves names to checked addresses: the client connects to exactly the addresses returned here.

A name is resolved once per connection, or taken from a short cache of *checked* answers. The policy
checks every address, and one forbidden address refuses the name: a host with a public and a private
address is an attack. Failures are cached for a short time too; otherwise a thousand tasks for one
dead name would each start a lookup.

The system's resolver blocks a thread while a name server is silent, and the call cannot be stopped.
Three rules follow. A lookup runs to its end in a task of its own, and each fetch waits for it at
most `LOOKUP_S_MAX` seconds. The callers share the threads. A caller whose names are slow gets fewer
threads at a time.
"""

from __future__ import annotations

import copy
import socket
from collections.abc import Awaitable, Callable, Sequence

import trio

from conveyor.domain.submit.target import Target, TargetPolicy
from conveyor.http_client.errors import (
    DETAIL,
    FetchFailed,
    ForbiddenTarget,
    NameNotResolved,
    OutOfResources,
    check_descriptors,
)
from conveyor.http_client.fair_permits import Bounds, FairPermits
from conveyor.ports.errors import is_resource_shortage

Lookup = Callable[[str], Awaitable[Sequence[str]]]

# A larger value follows DNS changes later; a smaller one repeats lookups of busy hosts.
CACHE_TTL_S = 30.0
# Shorter than for answers, so that a repaired name works again soon.
CACHE_FAILURE_TTL_S = 5.0
# Bounds the memory of the cache. When it is full, the oldest entry is dropped.
CACHE_NAMES_MAX = 4096
# Bounds one cache entry. The pool tries fewer addresses than this.
ADDRESSES_MAX = 16
# The longest wait of a fetch for a lookup. The system's resolver waits 10 s and more for a silent
# server.
LOOKUP_S_MAX = 5.0
# A lookup that takes longer counts as slow: a recursive resolver answers most names within 1 s.
LOOKUP_SLOW_S = 2.0
# A blocked thread costs little except its stack. A caller starts with 8 lookups at a time. The
# share falls to 2 if its names are slow, and grows to half of all if they are not, because wide
# crawls resolve many names.
LOOKUPS = Bounds(total=64, initial=8, min=2, max=32)
# Slow lookups stop counting against LOOKUPS, so that quick lookups can run, while at most this many
# are slow. Each one blocks a thread, so this bounds the threads.
SLOW_LOOKUPS_MAX = 192


def system_lookup() -> Lookup:
    """The system's resolver in threads of its own: slow names must not delay disk operations."""
    limiter = trio.CapacityLimiter(LOOKUPS.total + SLOW_LOOKUPS_MAX)

    async def lookup(host: str) -> Sequence[str]:
        # For a name as bytes, the socket module skips its own IDNA, a second and laxer parser.
        entries = await trio.to_thread.run_sync(
            _getaddrinfo, host.encode("ascii"), abandon_on_cancel=True, limiter=limiter
        )
        return list(dict.fromkeys(str(entry[4][0]) for entry in entries))

    return lookup


def _getaddrinfo(host: bytes) -> Sequence[tuple[object, object, object, str, tuple[object, ...]]]:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)


class _Question:
    """A running lookup and its failure, if it has one that is not cached."""

    __slots__ = ("begun_at", "done", "failure", "is_deprioritised")

    def __init__(self) -> None:
        self.begun_at = trio.current_time()
        self.done = trio.Event()
        self.failure: Exception | None = None
        self.is_deprioritised = False


class Resolver:
    """Owns the cache. Concurrent requests for one name share one lookup."""

    def __init__(self, policy: TargetPolicy, lookup: Lookup | None = None) -> None:
        self._policy = policy
        self._lookup = lookup or system_lookup()
        self._answers: dict[str, tuple[float, tuple[str, ...] | FetchFailed]] = {}
        self._shares = FairPermits(LOOKUPS)
        self._pending: dict[str, _Question] = {}
        self._queued: dict[tuple[str, str], trio.Event] = {}
        self._slow_count = 0

    async def resolve(self, target: Target, partition: str = "") -> tuple[str, ...]:
        """Returns the checked addresses of the target, in the order to try them.

        If a lookup is necessary, it counts against the share of the caller `partition`. Raises
        ForbiddenTarget and NameNotResolved, and OutOfResources if this process is the cause.
        """
        refusal = self._policy.forbids_target(target)
        if refusal is not None:
            raise ForbiddenTarget(refusal)
        host = target.host
        if _is_literal(host):
            return self._check_addresses([host])
        while True:
            answer = self._answers.get(host)
            if answer is not None and answer[0] > trio.current_time():
                return _raise_or_return(answer[1])
            question = self._pending.get(host)
            if question is None:
                await self._ask(host, partition)
            else:
                await _wait_for(question)

    async def _ask(self, host: str, partition: str) -> None:
        """Starts a lookup, unless another one started or ended while this caller waited.

        Each caller waits for its own permit, even if another caller already waits for the same
        name: otherwise a fast caller would depend on the share of a slow one.
        """
        key = (partition, host)
        if key in self._queued:
            await self._queued[key].wait()
            return
        queued = self._queued[key] = trio.Event()
        try:
            await self._shares.acquire(partition)
        finally:
            del self._queued[key]
            queued.set()
        if host in self._pending or self._is_known(host):
            self._shares.release(partition)
            return
        question = self._pending[host] = _Question()
        trio.lowlevel.spawn_system_task(self._answer, host, partition, question)

    def _is_known(self, host: str) -> bool:
        answer = self._answers.get(host)
        return answer is not None and answer[0] > trio.current_time()

    async def _answer(self, host: str, partition: str, question: _Question) -> None:
        """Runs a lookup and caches its result, even if no fetch waits for it any more."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._deprioritise, partition, question)
            try:
                self._remember(host, self._check_addresses(await self._look_up(host)), CACHE_TTL_S)
            except OutOfResources as shortage:
                question.failure = shortage  # Not cached: it is no property of the name.
            except FetchFailed as failure:
                self._remember(host, failure, CACHE_FAILURE_TTL_S)
            except (RuntimeError, MemoryError) as error:
                # Raised in the fetches that wait. In this system task it would end the process.
                question.failure = error
            finally:
                self._end(host, partition, question)
            nursery.cancel_scope.cancel()

    async def _deprioritise(self, partition: str, question: _Question) -> None:
        """Frees the permit of a lookup after LOOKUP_SLOW_S, so that quick lookups can run."""
        await trio.sleep(LOOKUP_SLOW_S)
        if self._slow_count < SLOW_LOOKUPS_MAX:
            self._slow_count += 1
            question.is_deprioritised = True
            self._shares.detach(partition, LOOKUP_SLOW_S, is_slow=True)

    def _end(self, host: str, partition: str, question: _Question) -> None:
        used_s = trio.current_time() - question.begun_at
        if question.is_deprioritised:
            self._slow_count -= 1
            self._shares.settle(partition, used_s - LOOKUP_SLOW_S)
        else:
            self._shares.release(partition, used_s, is_slow=used_s > LOOKUP_SLOW_S)
        del self._pending[host]
        question.done.set()

    async def _look_up(self, host: str) -> Sequence[str]:
        try:
            return await self._lookup(host)
        except socket.gaierror as error:
            if error.errno == socket.EAI_MEMORY:
                raise OutOfResources(DETAIL) from error
            check_descriptors()
            is_temporary = error.errno == socket.EAI_AGAIN
            detail = "cannot be resolved for now" if is_temporary else "does not exist"
            raise NameNotResolved(f"the host name {detail}", is_temporary=is_temporary) from error
        except (OSError, UnicodeError, RuntimeError, MemoryError) as error:
            if is_resource_shortage(error):
                raise OutOfResources(DETAIL) from error
            if isinstance(error, RuntimeError | MemoryError):
                raise
            raise NameNotResolved("the resolver failed", is_temporary=True) from error

    def _check_addresses(self, addresses: Sequence[str]) -> tuple[str, ...]:
        if not addresses:
            raise NameNotResolved("the host name has no address", is_temporary=False)
        for address in addresses:
            refusal = self._policy.forbids_address(address)
            if refusal is not None:
                raise ForbiddenTarget(refusal)
        return tuple(addresses[:ADDRESSES_MAX])

    def _remember(self, host: str, said: tuple[str, ...] | FetchFailed, ttl_s: float) -> None:
        self._answers.pop(host, None)
        if len(self._answers) >= CACHE_NAMES_MAX:
            del self._answers[next(iter(self._answers))]
        self._answers[host] = (trio.current_time() + ttl_s, said)


async def _wait_for(question: _Question) -> None:
    with trio.move_on_at(question.begun_at + LOOKUP_S_MAX):
        await question.done.wait()
    if not question.done.is_set():
        raise NameNotResolved("the name servers did not answer in time", is_temporary=True)
    if question.failure is not None:
        raise copy.copy(question.failure) from question.failure


def _raise_or_return(answer: tuple[str, ...] | FetchFailed) -> tuple[str, ...]:
    if isinstance(answer, FetchFailed):
        # Raise a copy: an exception that is raised twice collects both tracebacks.
        raise copy.copy(answer)
    return answer


def _is_literal(host: str) -> bool:
    return ":" in host or host.rpartition(".")[2].isdigit()
