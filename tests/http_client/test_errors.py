"""A process without descriptors, memory, threads or ports reports itself, and never blames the
site."""

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
    """Open descriptors stay open; no other can be opened."""
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


async def test_a_connect_without_free_descriptors_is_no_failure_of_the_site() -> None:
    with no_descriptors(), pytest.raises(OutOfResources):
        await connect("127.0.0.1", 9)


async def test_a_refused_connect_is_a_failure_of_the_site() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]

    with pytest.raises(ConnectFailed):
        await connect("127.0.0.1", port)


async def test_a_lookup_that_fails_without_descriptors_does_not_mean_that_the_name_is_unknown() -> (
    None
):
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
async def test_a_shortage_during_a_lookup_is_not_cached(
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


def test_a_process_with_free_descriptors_has_no_shortage() -> None:
    check_descriptors()


def test_exhausted_ports_are_distinguished_from_an_unreachable_address_family() -> None:
    no_address = OSError(errno.EADDRNOTAVAIL, "")

    # The peer is reachable, so there was no local address because all ports were in use.
    assert isinstance(judge_connect(no_address, "127.0.0.1", 80), OutOfResources)
    # A scoped address without its scope cannot be reached from any local address.
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
