"""A process that is out of descriptors, memory, threads or ports blames itself, never the site."""

from __future__ import annotations

import errno
import resource
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from conveyor.domain.submit.target import Target, TargetPolicy, parse_url
from conveyor.http_client.errors import (
    ConnectFailed,
    NameNotResolved,
    OutOfResources,
    check_descriptors,
    judge_connect,
)
from conveyor.http_client.resolver import Resolver
from conveyor.http_client.stream import connect
from conveyor.ports.errors import is_resource_shortage

LOCAL = TargetPolicy(allow_private=True)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Those that are open stay open; no other can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def target(url: str) -> Target:
    parsed = parse_url(url)
    assert isinstance(parsed, Target)
    return parsed


async def test_a_connect_without_descriptors_is_no_failure_of_the_site() -> None:
    with no_descriptors(), pytest.raises(OutOfResources):
        await connect("127.0.0.1", 9)


async def test_a_refused_connect_is_one() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]

    with pytest.raises(ConnectFailed):
        await connect("127.0.0.1", port)


async def test_a_name_that_cannot_be_looked_up_for_want_of_descriptors_may_exist() -> None:
    async def lookup(host: str) -> Sequence[str]:
        raise socket.gaierror(socket.EAI_NONAME, "")

    resolver = Resolver(LOCAL, lookup)

    with no_descriptors(), pytest.raises(OutOfResources):
        await resolver.resolve(target("http://site.test/"))
    with pytest.raises(NameNotResolved):
        await resolver.resolve(target("http://site.test/"))


@pytest.mark.parametrize(
    "shortage",
    [
        OSError(errno.EMFILE, ""),
        OSError(errno.ENOMEM, ""),
        RuntimeError("can't start new thread"),
        MemoryError(),
        socket.gaierror(socket.EAI_MEMORY, ""),
    ],
)
async def test_a_shortage_during_a_lookup_is_not_remembered_of_the_name(
    shortage: Exception,
) -> None:
    failures = [shortage]

    async def lookup(host: str) -> Sequence[str]:
        if failures:
            raise failures.pop()
        return ["127.0.0.1"]

    resolver = Resolver(LOCAL, lookup)

    with pytest.raises(OutOfResources):
        await resolver.resolve(target("http://site.test/"))
    assert await resolver.resolve(target("http://site.test/")) == ("127.0.0.1",)


def test_with_descriptors_nothing_is_short() -> None:
    check_descriptors()


def test_used_up_ports_are_told_from_a_machine_without_such_addresses() -> None:
    no_address = OSError(errno.EADDRNOTAVAIL, "")

    # A reachable peer: only for want of a port was there no local address.
    assert isinstance(judge_connect(no_address, "127.0.0.1", 80), OutOfResources)
    # A scoped address without its scope can be sent from nowhere.
    assert judge_connect(no_address, "fe80::1", 80) is None


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ECONNREFUSED, ""), ValueError("bad"), RuntimeError("a bug"), TimeoutError()],
)
def test_other_errors_are_no_shortage(error: Exception) -> None:
    assert not is_resource_shortage(error)


def test_a_shortage_within_a_group_is_found() -> None:
    group = ExceptionGroup("", [ValueError(), ExceptionGroup("", [OSError(errno.ENFILE, "")])])

    assert is_resource_shortage(group)
