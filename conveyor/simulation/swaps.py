"""Replaces functions, methods and constants of the product for a while.

The simulator overrides limits with it, and tests/mutants puts defects in. The product has no
switches for either. A swap whose target is gone, or takes other arguments, raises an error instead
of having no effect.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from typing import Any

Apply = Callable[[], AbstractContextManager[None]]
Make = Callable[[Any], Any]


class SwapTargetMissing(LookupError):
    """The target of a swap does not exist any more, or has another shape: the swap must be
    adapted."""


def swap(place: str, make: Make) -> Apply:
    """Returns a swap: while it is applied, the object at `package.module:name` or
    `package.module:Class.name` is replaced by what `make` returns for it."""

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


def swap_constant(place: str, value: object) -> Apply:
    """Returns a swap of a constant."""
    return swap(place, lambda _: value)


def combine(*swaps: Apply) -> Apply:
    """Returns one swap that applies all of these."""

    @contextmanager
    def applied() -> Iterator[None]:
        with ExitStack() as stack:
            for apply in swaps:
                stack.enter_context(apply())
            yield

    return applied


def original_of(place: str) -> Any:
    """Returns the object at a place of the product, for mutants that combine its parts
    differently."""
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
        raise SwapTargetMissing(f"there is no {place} any more") from error
    return owner, name


def _refuse_unlike(place: str, original: object, swapped: object) -> None:
    if type(original) is not type(swapped):
        raise SwapTargetMissing(f"{place} is a {type(original).__name__} now")
    if inspect.isfunction(original) and inspect.isfunction(swapped):
        kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(is_kind(original) is not is_kind(swapped) for is_kind in kinds):
            raise SwapTargetMissing(f"{place} is called in another way now")
        if _parameters(original) != _parameters(swapped):
            raise SwapTargetMissing(f"{place} takes {', '.join(_parameters(original))} now")


def _parameters(function: Callable[..., Any]) -> list[str]:
    return [name.lstrip("_") for name in inspect.signature(function).parameters]
