"""Compiles the part of DynamoDB's expression language that the engine uses, once per text.

Any other expression raises NotModelled, so that a new one cannot pass without a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from conveyor.simulation.models.dynamodb.values import (
    Attribute,
    Item,
    NotModelled,
    added,
    compared,
    invalid,
    is_equal,
)

_TOKEN = re.compile(r"\s*([#:]?[A-Za-z0-9_]+|<>|<=|>=|[=<>(),])")
_VERBS = frozenset({"SET", "REMOVE", "ADD"})
_COMPARATORS: dict[str, Callable[[int], bool]] = {
    "<": lambda order: order < 0,
    "<=": lambda order: order <= 0,
    ">": lambda order: order > 0,
    ">=": lambda order: order >= 0,
}


@dataclass(frozen=True, slots=True)
class Bindings:
    """The values of the placeholders (`#name` and `:value`) of an expression."""

    names: Mapping[str, str]
    values: Mapping[str, Attribute]

    def name(self, placeholder: str) -> str:
        if not placeholder.startswith("#"):
            return placeholder
        if placeholder not in self.names:
            raise invalid(f"An expression attribute name used is not defined: {placeholder}")
        return self.names[placeholder]

    def value(self, placeholder: str) -> Attribute:
        if placeholder not in self.values:
            raise invalid(f"An expression attribute value used is not defined: {placeholder}")
        return self.values[placeholder]


Test = Callable[[Item, Bindings], bool]
Operand = Callable[[Item, Bindings], Attribute | None]
Step = Callable[[Item, Item, Bindings], None]
"""Changes the second item, reading the first."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A compiled condition and the placeholders that it uses."""

    test: Test
    placeholders: frozenset[str]


@dataclass(frozen=True, slots=True)
class Change:
    """`targets` are the names that the expression sets or removes."""

    steps: tuple[Step, ...]
    targets: tuple[str, ...]
    placeholders: frozenset[str]


@dataclass(frozen=True, slots=True)
class KeyCondition:
    """A partition and a range within it. `sign` is one of the comparators, BETWEEN or
    begins_with."""

    partition: tuple[str, str]
    sort: tuple[str, str, tuple[str, ...]] | None
    placeholders: frozenset[str]


@lru_cache(maxsize=4096)
def condition(text: str) -> Condition:
    """Compiles a condition or filter expression."""
    reader = _Reader(text)
    test = _either(reader)
    reader.end()
    return Condition(test, frozenset(reader.placeholders))


@lru_cache(maxsize=4096)
def change(text: str) -> Change:
    """Compiles an update expression."""
    reader = _Reader(text)
    steps: list[Step] = []
    targets: list[str] = []
    seen: set[str] = set()
    while not reader.is_over:
        verb = reader.take().upper()
        if verb not in _VERBS:
            raise NotModelled(f"{verb} in an update: {text}")
        if verb in seen:
            raise invalid(f'The "{verb}" section can only be used once in an update expression')
        seen.add(verb)
        while True:
            steps.append(_CLAUSES[verb](reader, targets))
            if not reader.takes(","):
                break
    return Change(tuple(steps), tuple(targets), frozenset(reader.placeholders))


@lru_cache(maxsize=1024)
def key_condition(text: str) -> KeyCondition:
    """Compiles the key condition of a query."""
    reader = _Reader(text)
    parts = [_key_part(reader)]
    if reader.takes("AND"):
        parts.append(_key_part(reader))
    reader.end()
    name, sign, values = parts[0]
    if sign != "=":
        raise NotModelled(f"a partition that is not given first: {text}")
    sort = parts[1] if len(parts) > 1 else None
    return KeyCondition((name, values[0]), sort, frozenset(reader.placeholders))


@lru_cache(maxsize=256)
def projection(text: str) -> tuple[tuple[str, ...], frozenset[str]]:
    """The attribute names to return, and the placeholders among them."""
    reader = _Reader(text)
    names = [reader.name()]
    while reader.takes(","):
        names.append(reader.name())
    reader.end()
    return tuple(names), frozenset(reader.placeholders)


class _Reader:
    """The tokens of an expression, read from left to right."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.placeholders: set[str] = set()
        self._tokens: list[str] = []
        at, end = 0, len(text.rstrip())
        while at < end:
            match = _TOKEN.match(text, at)
            if match is None:
                raise NotModelled(f"{text[at]!r} in an expression: {text}")
            self._tokens.append(match[1])
            at = match.end()
        self._at = 0

    @property
    def is_over(self) -> bool:
        return self._at >= len(self._tokens)

    def peek(self) -> str:
        return "" if self.is_over else self._tokens[self._at]

    def take(self) -> str:
        if self.is_over:
            raise invalid(f"Invalid expression: it ends too early: {self.text}")
        self._at += 1
        token = self._tokens[self._at - 1]
        if token[0] in "#:":
            self.placeholders.add(token)
        return token

    def takes(self, word: str) -> bool:
        if self.peek().upper() != word:
            return False
        self._at += 1
        return True

    def expect(self, word: str) -> None:
        if not self.takes(word):
            raise invalid(f"Invalid expression: {word} expected: {self.text}")

    def name(self) -> str:
        token = self.take()
        if not (token[0] == "#" or token[0].isalpha() or token[0] == "_"):
            raise invalid(f"Invalid expression: {token} is no name: {self.text}")
        return token

    def value(self) -> str:
        token = self.take()
        if token[0] != ":":
            raise NotModelled(f"{token} where a value stands: {self.text}")
        return token

    def end(self) -> None:
        if not self.is_over:
            raise invalid(f"Invalid expression: {self.peek()} is too much: {self.text}")


def _either(reader: _Reader) -> Test:
    tests = [_both(reader)]
    while reader.takes("OR"):
        tests.append(_both(reader))
    return (
        tests[0]
        if len(tests) == 1
        else lambda item, bindings: any(t(item, bindings) for t in tests)
    )


def _both(reader: _Reader) -> Test:
    tests = [_single(reader)]
    while reader.takes("AND"):
        tests.append(_single(reader))
    return (
        tests[0]
        if len(tests) == 1
        else lambda item, bindings: all(t(item, bindings) for t in tests)
    )


def _single(reader: _Reader) -> Test:
    if reader.takes("NOT"):
        inner = _single(reader)
        return lambda item, bindings: not inner(item, bindings)
    if reader.takes("("):
        inner = _either(reader)
        reader.expect(")")
        return inner
    word = reader.peek()
    if word in _FUNCTIONS:
        reader.take()
        reader.expect("(")
        test = _FUNCTIONS[word](reader)
        reader.expect(")")
        return test
    return _comparison(reader)


def _comparison(reader: _Reader) -> Test:
    left = _operand(reader)
    if reader.takes("IN"):
        reader.expect("(")
        operands = [_operand(reader)]
        while reader.takes(","):
            operands.append(_operand(reader))
        reader.expect(")")
        return lambda item, bindings: any(
            is_equal(left(item, bindings), operand(item, bindings)) for operand in operands
        )
    if reader.takes("BETWEEN"):
        first = _operand(reader)
        reader.expect("AND")
        last = _operand(reader)
        at_least, at_most = _COMPARATORS[">="], _COMPARATORS["<="]
        return lambda item, bindings: (
            _holds(at_least, left, first, item, bindings)
            and _holds(at_most, left, last, item, bindings)
        )
    sign = reader.take()
    right = _operand(reader)
    if sign == "=":
        return lambda item, bindings: is_equal(left(item, bindings), right(item, bindings))
    if sign == "<>":
        return lambda item, bindings: not is_equal(left(item, bindings), right(item, bindings))
    if sign not in _COMPARATORS:
        raise NotModelled(f"{sign} in an expression: {reader.text}")
    return lambda item, bindings: _holds(_COMPARATORS[sign], left, right, item, bindings)


def _holds(
    fits: Callable[[int], bool], left: Operand, right: Operand, item: Item, bindings: Bindings
) -> bool:
    order = compared(left(item, bindings), right(item, bindings))
    return order is not None and fits(order)


def _operand(reader: _Reader) -> Operand:
    token = reader.take()
    if token[0] == ":":
        return lambda item, bindings: bindings.value(token)
    if not (token[0] == "#" or token[0].isalpha()) or reader.peek() == "(":
        raise NotModelled(f"{token} in an expression: {reader.text}")
    return lambda item, bindings: item.get(bindings.name(token))


def _exists(reader: _Reader) -> Test:
    name = reader.name()
    return lambda item, bindings: bindings.name(name) in item


def _not_exists(reader: _Reader) -> Test:
    name = reader.name()
    return lambda item, bindings: bindings.name(name) not in item


def _begins_with(reader: _Reader) -> Test:
    name = reader.name()
    reader.expect(",")
    prefix = reader.value()

    def test(item: Item, bindings: Bindings) -> bool:
        text: str | None = item.get(bindings.name(name), {}).get("S")
        return text is not None and text.startswith(bindings.value(prefix)["S"])

    return test


_FUNCTIONS: dict[str, Callable[[_Reader], Test]] = {
    "attribute_exists": _exists,
    "attribute_not_exists": _not_exists,
    "begins_with": _begins_with,
}


def _set(reader: _Reader, targets: list[str]) -> Step:
    name = reader.name()
    targets.append(name)
    reader.expect("=")
    operand = _operand(reader)

    def step(old: Item, new: Item, bindings: Bindings) -> None:
        value = operand(old, bindings)
        if value is None:
            raise invalid("The provided expression refers to an attribute that does not exist")
        new[bindings.name(name)] = value

    return step


def _remove(reader: _Reader, targets: list[str]) -> Step:
    name = reader.name()
    targets.append(name)

    def step(old: Item, new: Item, bindings: Bindings) -> None:
        new.pop(bindings.name(name), None)

    return step


def _add(reader: _Reader, targets: list[str]) -> Step:
    name = reader.name()
    targets.append(name)
    delta = reader.value()

    def step(old: Item, new: Item, bindings: Bindings) -> None:
        target = bindings.name(name)
        new[target] = added(old.get(target), bindings.value(delta))

    return step


_CLAUSES: dict[str, Callable[[_Reader, list[str]], Step]] = {
    "SET": _set,
    "REMOVE": _remove,
    "ADD": _add,
}


def _key_part(reader: _Reader) -> tuple[str, str, tuple[str, ...]]:
    if reader.takes("BEGINS_WITH"):
        reader.expect("(")
        name = reader.name()
        reader.expect(",")
        prefix = reader.value()
        reader.expect(")")
        return name, "begins_with", (prefix,)
    name = reader.name()
    if reader.takes("BETWEEN"):
        first = reader.value()
        reader.expect("AND")
        return name, "BETWEEN", (first, reader.value())
    sign = reader.take()
    if sign != "=" and sign not in _COMPARATORS:
        raise NotModelled(f"{sign} in a key condition: {reader.text}")
    return name, sign, (reader.value(),)


def check_placeholders(params: Mapping[str, Any], *used: frozenset[str]) -> None:
    """DynamoDB refuses names and values that no expression uses, so this does as well."""
    names = params.get("ExpressionAttributeNames", ())
    unused = {*names, *params.get("ExpressionAttributeValues", ())}.difference(*used)
    if unused:
        raise invalid(f"unused in expressions: {', '.join(sorted(unused))}")
