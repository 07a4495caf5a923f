"""Names contain none of the retired words, each of which has a plain replacement (CONTRIBUTING,
glossary)."""

from __future__ import annotations

import ast
import re

import pytest

from tests.tidy.sources import CODE, Module, modules

RETIRED = frozenset(
    [
        "desk",
        "purse",
        "toll",
        "door",
        "doors",
        "doorkeeper",
        "doorbell",
        "porter",
        "seat",
        "glance",
        "fate",
        "road",
        "mood",
        "moods",
        "hands",
        "aside",
        "lane",
        "lanes",
        "seam",
        "sabotage",
        "remnant",
        "trespass",
        "mischief",
        "sighting",
        "muster",
        "incarnate",
        "sideline",
        "sidelined",
        "rehearsal",
        "scrub",
        "scrubs",
        "scrubbed",
        "unchecked",
    ]
)
# Stored names, and classes that are named after a stored kind of row.
STORED = frozenset(["scrub_id", "ScrubKey", "DueScrubs"])

# Participles and pronouns that do not describe a value. They must not be names of variables; in
# texts they are ordinary English.
VAGUE = frozenset(
    [
        "each",
        "told",
        "begun",
        "given",
        "asked",
        "shown",
        "kept",
        "made",
        "some",
        "stands",
        "found",
        "wanted",
    ]
)

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def names_in(module: Module) -> set[str]:
    """Every identifier of a module, and the parts of its path."""
    names = set(re.split(r"[/.]", module.name))
    for node in ast.walk(module.tree):
        for field in ("id", "attr", "arg", "name", "asname"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                names.add(name)
    return names


def find_retired(names: set[str]) -> list[str]:
    return sorted(name for name in names - STORED if RETIRED & _words_of(name))


def _words_of(name: str) -> set[str]:
    words = {word.lower() for word in _WORD.findall(name)}
    return words | {word.removesuffix("s") for word in words}


def test_no_name_uses_a_retired_word() -> None:
    problems = [
        f"{module.name}: {name}"
        for module in modules(*CODE)
        for name in find_retired(names_in(module))
    ]

    assert problems == []


def vague_in(tree: ast.Module) -> list[str]:
    """Variables and parameters, but not attributes and keywords, whose names other modules
    define."""
    return [
        name
        for node in ast.walk(tree)
        if (name := getattr(node, "id", None) or getattr(node, "arg", None)) in VAGUE
        and isinstance(node, ast.Name | ast.arg)
    ]


def test_no_variable_has_a_vague_name() -> None:
    problems = [
        f"{module.name}: {name}" for module in modules(*CODE) for name in vague_in(module.tree)
    ]

    assert problems == []


def test_a_vague_variable_name_is_found() -> None:
    tree = ast.parse("def f(given): return [each for each in given if told.made]")

    assert sorted(set(vague_in(tree))) == ["each", "given", "told"]


@pytest.mark.parametrize("name", ["_new_desk", "TollGate", "LANES_MAX", "doorbell", "sightings"])
def test_a_retired_word_is_found(name: str) -> None:
    assert find_retired({name}) == [name]
