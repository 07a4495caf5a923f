"""Filters: what the query of a rerun says about which tasks start over (SPEC.md 4.18)."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from conveyor.api.call import Call
from conveyor.domain import limits
from conveyor.domain.errors import InvalidArgument
from conveyor.domain.model import FailureReason, TaskStatus
from conveyor.domain.urls import host_of
from conveyor.usecases.choosing import Choice

E = TypeVar("E", bound=StrEnum)


def choice_from(call: Call) -> Choice:
    return Choice(
        retry=_members(call, "status", TaskStatus),
        reasons=_members(call, "reason", FailureReason),
        hosts=_hosts(call),
    )


def _members(call: Call, name: str, kind: type[E]) -> frozenset[E] | None:
    texts = _texts(call, name)
    if texts is None:
        return None
    if not set(texts) <= set(kind):
        raise InvalidArgument(
            f"{name} must be a comma-separated list of {', '.join(kind)}.", pointer=f"/{name}"
        )
    return frozenset(kind(text) for text in texts)


def _hosts(call: Call) -> frozenset[str] | None:
    """As the URL parser writes them, so that what looks alike is alike."""
    texts = _texts(call, "host")
    if texts is None:
        return None
    hosts = [host_of(f"https://{text}/") if _is_bare(text) else None for text in texts]
    known = frozenset(host for host in hosts if host is not None)
    if None in hosts or len(known) > limits.RERUN_HOSTS_MAX:
        raise InvalidArgument(
            f"host must be a comma-separated list of up to {limits.RERUN_HOSTS_MAX} hosts.",
            pointer="/host",
        )
    return known


def _is_bare(text: str) -> bool:
    """A host, without a port or anything else of a URL; an IPv6 address stands in brackets."""
    name = text[1:-1] if text[:1] == "[" and text[-1:] == "]" else text.replace(":", "/")
    return not set(name) & set("/?#@")


def _texts(call: Call, name: str) -> list[str] | None:
    given = call.parameter(name)
    return None if given is None else [text.strip() for text in given.split(",")]
