"""Names to addresses that were checked: what this returns is what gets connected to.

A name is resolved once per connection (or taken from a short cache of *checked* answers), every
address is judged, and one bad address refuses the name: a host that is half public is an attack.
Failures are kept for a moment too, or a thousand tasks for one dead name would ask in turn.

The system's resolver blocks a thread for as long as a name server is silent, and nothing can stop
it. So a lookup runs to its end beside those who asked, who wait for it 5 s at most; threads are
shared out among callers; and a caller whose names are slow may have few of them at a time.
"""

from __future__ import annotations

import copy
import socket
from collections.abc import Awaitable, Callable, Sequence

import trio

from conveyor.domain.submit.ssrf import TargetPolicy
from conveyor.domain.submit.url import Target
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

CACHE_TTL_S = 30.0
CACHE_FAILURE_TTL_S = 5.0
CACHE_NAMES_MAX = 4096
ADDRESSES_MAX = 16
# How long a lookup is waited for. The system's resolver asks a silent server for 10 s and more.
LOOKUP_S_MAX = 5.0
# A lookup that took longer was slow: a recursive resolver answers for most names within 1 s.
LOOKUP_SLOW_S = 2.0
# A blocked thread costs little but its stack. A caller begins with 8 lookups at a time, ends with 2
# if its names are slow and with half of all if they are not: wide crawls ask for many names.
LOOKUPS = Bounds(total=64, initial=8, min=2, max=32)
# Slow lookups are moved out of the way of quick ones, as long as there are no more than these.
SLOW_LOOKUPS_MAX = 192


def system_lookup() -> Lookup:
    """The system's resolver, in threads of its own: slow names must not hold up the disk's."""
    limiter = trio.CapacityLimiter(LOOKUPS.total + SLOW_LOOKUPS_MAX)

    async def lookup(host: str) -> Sequence[str]:
        # As bytes, the name skips the socket module's own IDNA, a second and laxer parser.
        found = await trio.to_thread.run_sync(
            _getaddrinfo, host.encode("ascii"), abandon_on_cancel=True, limiter=limiter
        )
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    return lookup


def _getaddrinfo(host: bytes) -> Sequence[tuple[object, object, object, str, tuple[object, ...]]]:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)


class _Question:
    """A lookup that is under way, and what came of it."""

    __slots__ = ("begun_at", "done", "failure", "is_deprioritised")

    def __init__(self) -> None:
        self.begun_at = trio.current_time()
        self.done = trio.Event()
        self.failure: Exception | None = None
        self.is_deprioritised = False


class Resolver:
    """Owns the cache; concurrent questions about one name become one lookup."""

    def __init__(self, policy: TargetPolicy, lookup: Lookup | None = None) -> None:
        self._policy = policy
        self._lookup = lookup or system_lookup()
        self._answers: dict[str, tuple[float, tuple[str, ...] | FetchFailed]] = {}
        self._shares = FairPermits(LOOKUPS)
        self._pending: dict[str, _Question] = {}
        self._queued: dict[tuple[str, str], trio.Event] = {}
        self._slow_count = 0

    async def resolve(self, target: Target, partition: str = "") -> tuple[str, ...]:
        """Checked addresses of the target, in the order to try them. The lookup, if one is needed,
        is on the account of the caller `partition`.

        Raises ForbiddenTarget and NameNotResolved, and OutOfResources where this process is the
        cause.
        """
        refusal = self._policy.forbids_target(target)
        if refusal is not None:
            raise ForbiddenTarget(refusal)
        host = target.host
        if _is_literal(host):
            return self._checked([host])
        while True:
            answer = self._answers.get(host)
            if answer is not None and answer[0] > trio.current_time():
                return _said(answer[1])
            question = self._pending.get(host)
            if question is None:
                await self._ask(host, partition)
            else:
                await _wait_for(question)

    async def _ask(self, host: str, partition: str) -> None:
        """Begins a lookup, unless one was begun or ended while this caller waited for its turn. A
        caller waits in its own line, even for a name that stands in another's line already.
        """
        key = (partition, host)
        if key in self._queued:
            await self._queued[key].wait()
            return
        begun = self._queued[key] = trio.Event()
        try:
            await self._shares.acquire(partition)
        finally:
            del self._queued[key]
            begun.set()
        if host in self._pending or self._is_known(host):
            self._shares.release(partition)
            return
        question = self._pending[host] = _Question()
        trio.lowlevel.spawn_system_task(self._answer, host, partition, question)

    def _is_known(self, host: str) -> bool:
        answer = self._answers.get(host)
        return answer is not None and answer[0] > trio.current_time()

    async def _answer(self, host: str, partition: str, question: _Question) -> None:
        """Looks a name up and remembers what came of it, whether or not anyone still waits."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._deprioritise, partition, question)
            try:
                self._remember(host, self._checked(await self._look_up(host)), CACHE_TTL_S)
            except OutOfResources as shortage:
                question.failure = shortage  # This says nothing about the name.
            except FetchFailed as failure:
                self._remember(host, failure, CACHE_FAILURE_TTL_S)
            except (RuntimeError, MemoryError) as error:
                question.failure = error  # For those who asked: here it would end the process.
            finally:
                self._end(host, partition, question)
            nursery.cancel_scope.cancel()

    async def _deprioritise(self, partition: str, question: _Question) -> None:
        """Frees the permit of a lookup that turns out to be slow."""
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

    def _checked(self, addresses: Sequence[str]) -> tuple[str, ...]:
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


def _said(answer: tuple[str, ...] | FetchFailed) -> tuple[str, ...]:
    if isinstance(answer, FetchFailed):
        # A copy: an exception that is raised twice collects both tracebacks.
        raise copy.copy(answer)
    return answer


def _is_literal(host: str) -> bool:
    return ":" in host or host.rpartition(".")[2].isdigit()
