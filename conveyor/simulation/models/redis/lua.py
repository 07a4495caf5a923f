"""Runs Lua scripts with the type conversions of Redis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lupa import lua51

from conveyor.simulation.models.redis.keyspace import Reply

Call = Callable[..., Reply]


class Lua:
    """Compiles each script once for all servers."""

    def __init__(self) -> None:
        self._lua = lua51.LuaRuntime(register_eval=False, register_builtins=False)
        self._compiled: dict[str, Any] = {}

    def run(self, text: str, keys: Sequence[str], args: Sequence[str | int], call: Call) -> Any:
        function = self._compiled.get(text)
        if function is None:
            function = self._lua.eval(f"function(KEYS, ARGV, redis) {text}\nend")
            self._compiled[text] = function
        table = self._lua.table_from

        def called(name: str, *arguments: str | float) -> Any:
            reply = call(name, *map(_argument, arguments))
            return table(reply) if isinstance(reply, list) else reply

        answer = function(
            table(list(keys)), table([str(arg) for arg in args]), table({"call": called})
        )
        return _answer(answer)


def _argument(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.17g}"


def _answer(value: Any) -> Any:
    """Converts a Lua value to a reply as Redis does: numbers lose their fraction, a list ends at
    its first nil, and false becomes nil."""
    if lua51.lua_type(value) == "table":
        answers = []
        for number in range(1, len(value) + 1):
            if value[number] is None:
                break
            answers.append(_answer(value[number]))
        return answers
    if isinstance(value, bool):
        return 1 if value else None
    return int(value) if isinstance(value, float) else value
