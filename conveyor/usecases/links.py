"""Links: tokens that make one address work without a key, for a while (docs/api.md, Results)."""

from __future__ import annotations

import hmac
from collections.abc import Callable

from conveyor.domain.errors import NotFound
from conveyor.domain.ids import CallerId
from conveyor.usecases.env import Env

LetsIn = Callable[[CallerId], bool]
"""Whether the key of a caller would be let in now: its links end with it."""


def let_all_in(caller: CallerId) -> bool:
    return True


def make_token(env: Env, what: str, *, purpose: str, until: float) -> str:
    return f"{int(until)}.{_signature(env, what, purpose, int(until))}"


def check_token(env: Env, token: str, what: str, *, purpose: str, absent: str) -> None:
    """NotFound for any token that we did not make for this, and once its time is over."""
    text, _, signature = token.partition(".")
    expires = int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0
    # Only as we write it: leading zeros would give one link many spellings.
    is_ours = text == str(expires)
    expected = _signature(env, what, purpose, expires)
    if not is_ours or not signature.isascii() or not hmac.compare_digest(expected, signature):
        raise NotFound(absent)
    if expires < env.now():
        raise NotFound("The link has expired; ask again for a new one.")


def _signature(env: Env, what: str, purpose: str, expires: int) -> str:
    return env.vault.sign(f"{what}/{expires}", purpose=purpose)
