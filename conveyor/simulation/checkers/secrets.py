"""Checks secrets: nothing that callers send as a secret is found in plain text anywhere (I45)."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress

import msgspec

from conveyor.simulation.checkers.export import published
from conveyor.simulation.client_history import Call, Delivery, History
from conveyor.simulation.environment.export_reader import READ_ERRORS, unpacked
from conveyor.simulation.invariant_monitor import StateChange
from conveyor.simulation.secret_markers import MARK

_MARK = MARK.encode()
_ROTATE = "/v1/hmac/keys/rotate"


def no_secret_is_stored(state: StateChange) -> Iterator[str]:
    """I45: no row, message, coordination entry or body contains a secret."""
    secrets = [_MARK, *_signing_secrets(state.history)]
    encode = msgspec.msgpack.encode
    for kind, table in state.after.rows.items():
        rows = list(table.values())
        if _is_in(encode(rows), secrets):
            (*_, last_row) = (row for row in rows if _is_in(encode(row), secrets))
            yield f"there is a secret in the {type(last_row).__name__} at {kind.__name__}"
    for item in state.stored_items():
        if _MARK in item.content or MARK in item.name:
            yield f"there is a secret in the {item.location} {item.name}"


def no_secret_is_exported(state: StateChange) -> Iterator[str]:
    """I45: no exported file contains a secret, in whatever format."""
    for export, _ in published(state):
        file = state.body(export.key) if export.key else None
        with suppress(*READ_ERRORS):
            if file is not None and _MARK in unpacked(export.format, file):
                yield f"there is a secret in export {export.export_id}"


def no_secret_is_logged(state: StateChange) -> Iterator[str]:
    """I45: no log line contains a secret."""
    yield from (f"logged: {line[:300]}" for line in state.history.logged if MARK in line)


def no_secret_is_shown(state: StateChange, call: Call) -> Iterator[str]:
    """I45: no response contains a secret, not even the caller's own. The response that creates a
    signing key is the exception."""
    secrets = [_MARK]
    if call.route != _ROTATE:
        secrets += _signing_secrets(state.history)
    if _is_in(call.answer, secrets):
        yield f"call {call.number} was shown a secret"


def no_secret_is_delivered(state: StateChange, delivery: Delivery) -> Iterator[str]:
    """I45: no webhook delivery contains a secret."""
    secrets = [_MARK, *_signing_secrets(state.history)]
    texts = [delivery.body, repr(delivery.headers).encode()]
    if any(_is_in(text, secrets) for text in texts):
        yield f"event {delivery.event_id} contains a secret"


def _signing_secrets(history: History) -> Iterator[bytes]:
    """The signing secrets, raw and as base64."""
    for secrets in history.signing_secrets.values():
        for secret in secrets:
            if secret is not None:
                yield from (secret, b64encode(secret))


def _is_in(text: bytes, secrets: list[bytes]) -> bool:
    return any(secret in text for secret in secrets)
