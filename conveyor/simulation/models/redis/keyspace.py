"""The data of one Redis server, and the commands that the engine's scripts use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Value = str | dict[str, Any]
Reply = str | int | list[str] | bool
"""A reply as a script sees it: a missing value is False."""


@dataclass(slots=True)
class Keyspace:
    """`undo` has what each write of the last `kept_s` seconds replaced, the newest last."""

    now: Callable[[], float]
    kept_s: float
    values: dict[str, Value] = field(default_factory=dict)
    expires_at: dict[str, float] = field(default_factory=dict)
    undo: deque[tuple[float, str, Value | None, float | None]] = field(default_factory=deque)

    def call(self, name: str, *args: str) -> Reply:
        """Runs one Redis command."""
        command = _COMMANDS.get(name)
        if command is None:
            raise NotImplementedError(f"the Redis command {name}")
        if args and self.expires_at.get(args[0], self.now() + 1) <= self.now():
            self.forget(args[0])
        if name not in _READS:
            self._note(args[0])
        return command(self, *args)

    def forget(self, key: str) -> None:
        self.values.pop(key, None)
        self.expires_at.pop(key, None)

    def lose_last_writes(self, lost_s: float) -> None:
        """Undoes the writes of the last `lost_s` seconds: a replica that did not receive them
        became the primary."""
        since = self.now() - lost_s
        while self.undo and self.undo[-1][0] > since:
            _, key, value, expires_at = self.undo.pop()
            self.forget(key)
            if value is not None:
                self.values[key] = value
            if expires_at is not None:
                self.expires_at[key] = expires_at

    def copy(self) -> Keyspace:
        values = {key: _copied(value) for key, value in self.values.items()}
        return Keyspace(self.now, self.kept_s, values, dict(self.expires_at), deque(self.undo))

    def inside(self, key: str) -> dict[str, Any]:
        """The scores of a sorted set by member, or the fields of a hash."""
        value = self.values.get(key, {})
        assert isinstance(value, dict), f"{key} is of another type"
        return value

    def drop_if_empty(self, key: str) -> None:
        if not self.values.get(key):
            self.forget(key)

    def _note(self, key: str) -> None:
        if not self.kept_s:
            return
        now, value = self.now(), self.values.get(key)
        while self.undo and self.undo[0][0] < now - self.kept_s:
            self.undo.popleft()
        copy = None if value is None else _copied(value)
        self.undo.append((now, key, copy, self.expires_at.get(key)))


def _copied(value: Value) -> Value:
    return value if isinstance(value, str) else dict(value)


def _time(space: Keyspace) -> Reply:
    whole = int(space.now())
    return [str(whole), str(int(space.now() % 1 * 1_000_000))]


def _pttl(space: Keyspace, key: str) -> Reply:
    if key not in space.values:
        return -2
    expires_at = space.expires_at.get(key)
    return -1 if expires_at is None else int((expires_at - space.now()) * 1000)


def _pexpire(space: Keyspace, key: str, ms: str) -> Reply:
    if key not in space.values:
        return 0
    space.expires_at[key] = space.now() + int(ms) / 1000
    return 1


def _get(space: Keyspace, key: str) -> Reply:
    value = space.values.get(key, False)
    assert value is False or isinstance(value, str), f"{key} is of another type"
    return value


def _set(space: Keyspace, key: str, text: str, px: str, ms: str) -> Reply:
    assert px == "PX"
    space.values[key] = text
    space.expires_at[key] = space.now() + int(ms) / 1000
    return "OK"


def _del(space: Keyspace, key: str) -> Reply:
    was_there = key in space.values
    space.forget(key)
    return int(was_there)


def _zadd(space: Keyspace, key: str, score: str, member: str) -> Reply:
    scores = space.inside(key)
    is_new = member not in scores
    scores[member] = float(score)
    space.values[key] = scores
    return int(is_new)


def _zrem(space: Keyspace, key: str, *members: str) -> Reply:
    scores = space.inside(key)
    gone = sum(scores.pop(member, None) is not None for member in members)
    space.drop_if_empty(key)
    return gone


def _zcard(space: Keyspace, key: str) -> Reply:
    return len(space.inside(key))


def _zscore(space: Keyspace, key: str, member: str) -> Reply:
    score = space.inside(key).get(member)
    return False if score is None else f"{score:.17g}"


def _zrangebyscore(space: Keyspace, key: str, first: str, last: str) -> Reply:
    scores = space.inside(key)
    inside = [member for member in scores if _is_within(scores[member], first, last)]
    return sorted(inside, key=lambda member: (scores[member], member))


def _zremrangebyscore(space: Keyspace, key: str, first: str, last: str) -> Reply:
    scores = space.inside(key)
    return _zrem(
        space, key, *[member for member in scores if _is_within(scores[member], first, last)]
    )


def _is_within(score: float, first: str, last: str) -> bool:
    low, high = float(first.lstrip("(")), float(last.lstrip("("))
    is_above = score > low if first.startswith("(") else score >= low
    return is_above and (score < high if last.startswith("(") else score <= high)


def _hset(space: Keyspace, key: str, name: str, text: str) -> Reply:
    fields = space.inside(key)
    is_new = name not in fields
    fields[name] = text
    space.values[key] = fields
    return int(is_new)


def _hdel(space: Keyspace, key: str, name: str) -> Reply:
    gone = space.inside(key).pop(name, None) is not None
    space.drop_if_empty(key)
    return int(gone)


def _hgetall(space: Keyspace, key: str) -> Reply:
    return [part for pair in space.inside(key).items() for part in pair]


_READS = frozenset({"TIME", "PTTL", "GET", "ZCARD", "ZSCORE", "ZRANGEBYSCORE", "HGETALL"})
_COMMANDS: dict[str, Callable[..., Reply]] = {
    "TIME": _time,
    "PTTL": _pttl,
    "PEXPIRE": _pexpire,
    "GET": _get,
    "SET": _set,
    "DEL": _del,
    "ZADD": _zadd,
    "ZREM": _zrem,
    "ZCARD": _zcard,
    "ZSCORE": _zscore,
    "ZRANGEBYSCORE": _zrangebyscore,
    "ZREMRANGEBYSCORE": _zremrangebyscore,
    "HSET": _hset,
    "HDEL": _hdel,
    "HGETALL": _hgetall,
}
