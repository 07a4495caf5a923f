"""Swaps: replace a function, a method or a constant of the product for a while.

The simulator overrides limits with them, and tests/mutants switches defects on. The product has no
switches for that. If the place that a swap names is gone, or takes other arguments, that is an
error, and not a swap that does nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from typing import Any

Apply = Callable[[], AbstractContextManager[None]]
Make = Callable[[Any], Any]


class PlaceGone(LookupError):
    """The product has changed: the swap has to follow."""


def swapping(place: str, make: Make) -> Apply:
    """Swaps what stands at `package.module:name` or `package.module:Class.name` for what `make`
    makes of it."""

    @contextmanager
    def applied() -> Iterator[None]:
        owner, name = _find(place)
        original = vars(owner)[name]
        swapped = make(original)
        _refuse_unlike(place, original, swapped)
        setattr(owner, name, swapped)
        try:
            yield
        finally:
            setattr(owner, name, original)

    return applied


def setting(place: str, value: object) -> Apply:
    """Swaps a constant."""
    return swapping(place, lambda _: value)


def combined(*swaps: Apply) -> Apply:
    """Several swaps as one."""

    @contextmanager
    def applied() -> Iterator[None]:
        with ExitStack() as stack:
            for swap in swaps:
                stack.enter_context(swap())
            yield

    return applied


def part(place: str) -> Any:
    """What the product has there, for mutants that put its parts together in another way."""
    owner, name = _find(place)
    return vars(owner)[name]


def _find(place: str) -> tuple[Any, str]:
    module, _, path = place.partition(":")
    *above, name = path.split(".")
    try:
        owner: Any = import_module(module)
        for attribute in above:
            owner = vars(owner)[attribute]
        vars(owner)[name]
    except (ImportError, KeyError) as error:
        raise PlaceGone(f"there is no {place} any more") from error
    return owner, name


def _refuse_unlike(place: str, original: object, swapped: object) -> None:
    if type(original) is not type(swapped):
        raise PlaceGone(f"{place} is a {type(original).__name__} now")
    if inspect.isfunction(original) and inspect.isfunction(swapped):
        kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(is_kind(original) is not is_kind(swapped) for is_kind in kinds):
            raise PlaceGone(f"{place} is called in another way now")
        if _parameters(original) != _parameters(swapped):
            raise PlaceGone(f"{place} takes {', '.join(_parameters(original))} now")


def _parameters(function: Callable[..., Any]) -> list[str]:
    return [name.lstrip("_") for name in inspect.signature(function).parameters]
