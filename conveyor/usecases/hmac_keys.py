"""HMAC keys: rotate, cancel, finalize, and open those that sign (docs/api.md, Webhooks)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from conveyor.domain import hmac_keys
from conveyor.domain.changes import Applied, SigningKeysKey
from conveyor.domain.errors import Conflict
from conveyor.domain.hooks import SigningKey, SigningKeys
from conveyor.domain.ids import CallerId
from conveyor.domain.signing import SECRET_BYTES, Secret
from conveyor.usecases.env import Env
from conveyor.usecases.optimistic import AGAIN, Again, retry_or_refuse

_SUBJECT = "The keys are"


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key, with its secret this once."""

    key: SigningKey
    secret: bytes = field(repr=False)


async def keys_of(env: Env, caller: CallerId) -> SigningKeys | None:
    return await env.store.read(SigningKeysKey(caller))


async def rotate(env: Env, caller: CallerId, *, kid: str) -> NewKey:
    """The caller's first key, or a candidate beside it. Repeated with the same `kid`, it answers
    with the key that the first call made."""
    return await retry_or_refuse(_SUBJECT, partial(_try_rotate, env, caller, kid))


async def _try_rotate(env: Env, caller: CallerId, kid: str) -> NewKey | Again:
    keys = await keys_of(env, caller)
    made = _find(keys, kid)
    if made is not None:
        return NewKey(made, _unseal(env, caller, made).key)
    if keys is not None and keys.candidate is not None:
        raise Conflict(
            "A candidate key is waiting: finalize or cancel that rotation first.",
            code="candidate_pending",
        )
    new = _generate(env, caller, kid)
    change = (
        hmac_keys.make_first(caller, new.key) if keys is None else hmac_keys.stage(keys, new.key)
    )
    return new if isinstance(await env.commit(change), Applied) else AGAIN


async def finalize(env: Env, caller: CallerId) -> SigningKey:
    """The candidate becomes the active key; the one before is forgotten."""
    return await retry_or_refuse(_SUBJECT, partial(_try_finalize, env, caller))


async def _try_finalize(env: Env, caller: CallerId) -> SigningKey | Again:
    keys = await keys_of(env, caller)
    if keys is None or keys.candidate is None:
        raise Conflict("There is no candidate key to finalize.", code="no_candidate")
    is_applied = isinstance(await env.commit(hmac_keys.promote(keys)), Applied)
    return keys.candidate if is_applied else AGAIN


async def cancel(env: Env, caller: CallerId) -> None:
    """Drops the candidate; without one there is nothing to do."""
    await retry_or_refuse(_SUBJECT, partial(_try_cancel, env, caller))


async def _try_cancel(env: Env, caller: CallerId) -> Again | None:
    keys = await keys_of(env, caller)
    if keys is None or keys.candidate is None:
        return None
    return None if isinstance(await env.commit(hmac_keys.drop(keys)), Applied) else AGAIN


async def open_secrets(env: Env, caller: CallerId) -> tuple[Secret, ...]:
    """What signs a delivery, the active key first. Raises Unsealable."""
    keys = await keys_of(env, caller)
    return tuple(_unseal(env, caller, key) for key in hmac_keys.in_use(keys)) if keys else ()


def _find(keys: SigningKeys | None, kid: str) -> SigningKey | None:
    held = hmac_keys.in_use(keys) if keys is not None else ()
    return next((key for key in held if key.kid == kid), None)


def _generate(env: Env, caller: CallerId, kid: str) -> NewKey:
    secret = env.random.getrandbits(8 * SECRET_BYTES).to_bytes(SECRET_BYTES, "big")
    sealed = env.vault.seal(secret, place=_place(caller, kid))
    return NewKey(SigningKey(kid, env.now(), sealed), secret)


def _unseal(env: Env, caller: CallerId, key: SigningKey) -> Secret:
    return Secret(key.kid, env.vault.unseal(key.sealed, place=_place(caller, key.kid)))


def _place(caller: CallerId, kid: str) -> str:
    return f"{caller}|hmac|{kid}"
