"""Names to addresses that were checked: what this returns is what gets connected to.

A name is resolved once per connection (or taken from a short cache of *checked* answers), every
address is judged, and one bad address refuses the name: a host that is half public is an attack.
Failures are kept for a moment too, or a thousand tasks for one dead name would ask in turn.
"""

from __future__ import annotations

import copy
import socket
from collections.abc import Awaitable, Callable, Sequence

import trio

from conveyor.domain.addresses import TargetPolicy
from conveyor.domain.urls import Target
from conveyor.net.errors import FetchFailed, ForbiddenTarget, NameNotResolved

Lookup = Callable[[str], Awaitable[Sequence[str]]]

CACHE_TTL_S = 30.0
CACHE_FAILURE_TTL_S = 5.0
CACHE_NAMES_MAX = 4096
LOOKUP_THREADS_MAX = 16
ADDRESSES_MAX = 16


def system_lookup() -> Lookup:
    """The system's resolver, in threads of its own: slow names must not hold up the disk's."""
    limiter = trio.CapacityLimiter(LOOKUP_THREADS_MAX)

    async def lookup(host: str) -> Sequence[str]:
        # As bytes, the name skips the socket module's own IDNA, a second and laxer parser.
        found = await trio.to_thread.run_sync(
            _getaddrinfo, host.encode("ascii"), abandon_on_cancel=True, limiter=limiter
        )
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    return lookup


def _getaddrinfo(host: bytes) -> Sequence[tuple[object, object, object, str, tuple[object, ...]]]:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)


class Resolver:
    """Owns the cache; concurrent questions about one name become one lookup."""

    def __init__(self, policy: TargetPolicy, lookup: Lookup | None = None) -> None:
        self._policy = policy
        self._lookup = lookup or system_lookup()
        self._answers: dict[str, tuple[float, tuple[str, ...] | FetchFailed]] = {}
        self._pending: dict[str, trio.Event] = {}

    async def resolve(self, target: Target) -> tuple[str, ...]:
        """Checked addresses of the target, in the order to try them.

        Raises ForbiddenTarget and NameNotResolved.
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
            pending = self._pending.get(host)
            if pending is None:
                return await self._ask(host)
            await pending.wait()

    async def _ask(self, host: str) -> tuple[str, ...]:
        done = self._pending[host] = trio.Event()
        try:
            addresses = self._checked(await self._look_up(host))
            self._remember(host, addresses, CACHE_TTL_S)
            return addresses
        except FetchFailed as failure:
            self._remember(host, failure, CACHE_FAILURE_TTL_S)
            raise
        finally:
            del self._pending[host]
            done.set()

    async def _look_up(self, host: str) -> Sequence[str]:
        try:
            return await self._lookup(host)
        except socket.gaierror as error:
            is_temporary = error.errno == socket.EAI_AGAIN
            detail = "cannot be resolved for now" if is_temporary else "does not exist"
            raise NameNotResolved(f"the host name {detail}", is_temporary=is_temporary) from error
        except (OSError, UnicodeError) as error:
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


def _said(answer: tuple[str, ...] | FetchFailed) -> tuple[str, ...]:
    if isinstance(answer, FetchFailed):
        # A copy: an exception that is raised twice collects both tracebacks.
        raise copy.copy(answer)
    return answer


def _is_literal(host: str) -> bool:
    return ":" in host or host.rpartition(".")[2].isdigit()
