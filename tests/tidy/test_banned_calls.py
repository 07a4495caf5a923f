"""Time, randomness, threads, the environment and the terminal may be used in a few modules only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.tidy.sources import ALL_PYTHON, CODE, Module, full_names, modules


@dataclass(frozen=True, slots=True)
class Ban:
    """A kind of call that only files with these prefixes may use."""

    what: str
    pattern: str
    places: tuple[str, ...]

    def matches(self, name: str) -> bool:
        return re.fullmatch(self.pattern, name) is not None


EDGES = (
    "conveyor/engines/system.py",
    "conveyor/cli/",
    "conveyor/bootstrap/runtime.py",
    "conveyor/http_client/",
    "conveyor/sdk/",  # This code runs in the caller's process.
)
BANS = (
    Ban("the wall clock", r"time\.(time|time_ns|ctime|localtime|gmtime)", EDGES),
    Ban("today", r"datetime\.(datetime|date)\.(now|utcnow|today)", EDGES),
    Ban("randomness", r"random\.(?!Random$|SystemRandom$)\w+", EDGES),
    Ban("a source of randomness", r"random\.SystemRandom", EDGES),
    Ban("unguessable numbers", r"uuid\.\w+|secrets\.\w+|os\.urandom", EDGES),
    Ban(
        "threads",
        r"trio\.to_thread(\..*)?|trio\.lowlevel\.start_thread_soon|threading\.Thread"
        r"|concurrent\.futures\.\w+",
        ("conveyor/engines/", "conveyor/http_client/", "conveyor/cli/", "conveyor/sdk/"),
    ),
    Ban("the environment", r"os\.(environ|getenv|putenv)(\..*)?", ("conveyor/config.py",)),
)
PRINTS = ("conveyor/cli/",)


def offences(module: Module) -> Iterator[str]:
    for node, name in full_names(module):
        for ban in BANS:
            if ban.matches(name) and not module.name.startswith(ban.places):
                yield f"{module.at(node)} {name}: {ban.what}"
    if not module.name.startswith(PRINTS):
        for call in ast.walk(module.tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "print":
                yield f"{module.at(call)} print"


def test_banned_calls_are_used_in_their_allowed_modules_only() -> None:
    problems = [offence for module in modules(*CODE) for offence in offences(module)]

    assert problems == []


@pytest.mark.parametrize(
    "code",
    [
        "import time\ntime.time()",
        "from time import time\ntime()",
        "import datetime as d\nd.datetime.now()",
        "from datetime import datetime\ndatetime.now(UTC)",
        "import random\nrandom.choice([1])",
        "from random import shuffle\nshuffle(x)",
        "import uuid\nuuid.uuid4()",
        "import secrets\nsecrets.token_hex()",
        "import os\nos.urandom(8)",
        "import os\nos.environ.get('X')",
        "from os import environ\nenviron['X']",
        "import trio\nawait_(trio.to_thread.run_sync)",
        "print('hello')",
    ],
)
def test_a_banned_call_is_found(code: str) -> None:
    module = Module("conveyor/domain/thing.py", code, ast.parse(code))

    assert list(offences(module)) != []


@pytest.mark.parametrize(
    "code",
    [
        "from random import Random\ndef f(random: Random): random.uniform(0, 1)",
        "import trio\ntrio.current_time()",
        "from datetime import datetime\ndatetime.fromtimestamp(now, UTC)",
        "clock.time()",
    ],
)
def test_values_passed_as_arguments_may_be_used(code: str) -> None:
    module = Module("conveyor/domain/thing.py", code, ast.parse(code))

    assert list(offences(module)) == []


def test_only_tests_benches_and_the_simulators_kernel_use_private_parts_of_trio() -> None:
    problems = [
        f"{module.at(node)} {name}"
        for module in modules(*ALL_PYTHON)
        if not module.name.startswith(
            ("tests/", "bench/", "conveyor/simulation/deterministic_trio.py")
        )
        for node, name in full_names(module)
        if name.startswith(("trio._", "trio.testing"))
    ]

    assert problems == []


def test_no_pattern_repeats_a_group_possessively() -> None:
    """Python 3.11.0 to 3.11.4 match `(?:...)*+` wrongly (CPython issue 106052)."""
    wrong = re.compile(r"\)(?:[*+?]|\{\d+(?:,\d*)?\})\+")
    character_class = re.compile(r"\[[^\]]*\]")

    problems = [
        f"{module.name}: {text}"
        for module in modules(*CODE)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
        for text in [node.value if isinstance(node.value, str) else node.value.decode("latin-1")]
        if wrong.search(character_class.sub("", text)) and "\n" not in text
    ]

    assert problems == []
