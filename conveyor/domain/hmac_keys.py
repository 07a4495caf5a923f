"""A caller's HMAC keys: make the first, stage a candidate, promote it or drop it
(docs/api.md, Webhooks).

One row a caller; every change is guarded by its version, so of two at once one is refused.
"""

from __future__ import annotations

from typing import Any

from conveyor.domain.changes import Change, Guard, Insert, SigningKeysKey, Update
from conveyor.domain.hooks import SigningKey, SigningKeys
from conveyor.domain.ids import CallerId


def make_first(caller: CallerId, key: SigningKey) -> Change:
    return Change((Insert(SigningKeysKey(caller), SigningKeys(caller, key)),))


def stage(keys: SigningKeys, key: SigningKey) -> Change:
    """The key signs beside the active one until it is promoted or dropped."""
    return _change(keys, candidate=key)


def promote(keys: SigningKeys) -> Change:
    assert keys.candidate is not None
    return _change(keys, active=keys.candidate, candidate=None)


def drop(keys: SigningKeys) -> Change:
    return _change(keys, candidate=None)


def in_use(keys: SigningKeys) -> tuple[SigningKey, ...]:
    """The keys that sign a delivery, the active one first."""
    return (keys.active,) if keys.candidate is None else (keys.active, keys.candidate)


def _change(keys: SigningKeys, **values: Any) -> Change:
    guard = Guard(equals=(("version", keys.version),))
    return Change((Update(SigningKeysKey(keys.caller), guard, values, {"version": 1}),))
