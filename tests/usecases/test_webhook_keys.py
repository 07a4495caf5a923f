"""HMAC keys: one is active, at most one is a candidate, and one of two concurrent calls wins."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from conveyor.domain.errors import Conflict
from conveyor.domain.ids import CallerId
from conveyor.ports.errors import Unavailable
from conveyor.ports.secret_box import CannotUnseal
from conveyor.usecases import webhook
from conveyor.usecases.context import Context
from conveyor.usecases.webhook import NewKey
from tests.builders import CALLER, a_ulid
from tests.usecases.faults import Fault, When, with_fault
from tests.usecases.world import OTHER_CALLER


async def rotate(env: Context, number: int, caller: CallerId = CALLER) -> NewKey:
    return await webhook.rotate(env, caller, kid=a_ulid(number))


async def kids(env: Context, caller: CallerId = CALLER) -> list[str]:
    return [secret.kid for secret in await webhook.open_secrets(env, caller)]


async def test_the_first_key_is_active_and_the_next_a_candidate(env: Context) -> None:
    first, second = await rotate(env, 1), await rotate(env, 2)

    opened = await webhook.open_secrets(env, CALLER)

    assert await kids(env) == [first.key.kid, second.key.kid]
    assert [secret.key for secret in opened] == [first.secret, second.secret]
    assert len(first.secret) == 32
    assert first.secret != second.secret


async def test_a_third_key_is_refused_while_there_is_a_candidate(env: Context) -> None:
    await rotate(env, 1)
    await rotate(env, 2)

    with pytest.raises(Conflict) as refused:
        await rotate(env, 3)

    assert refused.value.code == "candidate_pending"
    assert await kids(env) == [a_ulid(1), a_ulid(2)]


async def test_a_finalized_candidate_is_the_only_key(env: Context) -> None:
    await rotate(env, 1)
    await rotate(env, 2)

    active = await webhook.finalize(env, CALLER)

    assert active.kid == a_ulid(2)
    assert await kids(env) == [a_ulid(2)]


async def test_a_candidate_can_be_cancelled_twice(env: Context) -> None:
    await rotate(env, 1)
    await rotate(env, 2)

    await webhook.cancel(env, CALLER)
    await webhook.cancel(env, CALLER)

    assert await kids(env) == [a_ulid(1)]


@pytest.mark.parametrize("count", [0, 1])
async def test_without_a_candidate_finalize_is_refused(env: Context, count: int) -> None:
    for number in range(count):
        await rotate(env, number)

    with pytest.raises(Conflict) as refused:
        await webhook.finalize(env, CALLER)

    assert refused.value.code == "no_candidate"


async def test_callers_have_keys_of_their_own(env: Context) -> None:
    await rotate(env, 1)
    await rotate(env, 2, OTHER_CALLER)

    assert await kids(env) == [a_ulid(1)]
    assert await kids(env, OTHER_CALLER) == [a_ulid(2)]


async def test_a_secret_is_encrypted_for_its_caller_and_key(env: Context) -> None:
    key = await rotate(env, 1)

    assert key.secret.hex() not in key.key.sealed
    with pytest.raises(CannotUnseal):
        env.secret_box.unseal(key.key.sealed, place=f"{OTHER_CALLER}|hmac|{key.key.kid}")


async def run_concurrently(*calls: Callable[[], Awaitable[object]]) -> list[str]:
    """Runs the calls concurrently and returns the codes of those that were refused."""
    codes: list[str] = []

    async def run(call: Callable[[], Awaitable[object]]) -> None:
        try:
            await call()
        except Conflict as refusal:
            codes.append(refusal.code)

    async with trio.open_nursery() as nursery:
        for call in calls:
            nursery.start_soon(run, call)
    return codes


async def test_three_concurrent_rotations_make_one_active_key_and_one_candidate(
    env: Context,
) -> None:
    codes = await run_concurrently(
        *(lambda number=number: rotate(env, number) for number in range(3))
    )

    assert codes == ["candidate_pending"]
    assert len(set(await kids(env))) == 2


async def test_only_one_of_concurrent_finalize_and_cancel_succeeds(env: Context) -> None:
    await rotate(env, 1)
    await rotate(env, 2)

    codes = await run_concurrently(
        lambda: webhook.finalize(env, CALLER), lambda: webhook.cancel(env, CALLER)
    )

    assert (codes, await kids(env)) in (
        ([], [a_ulid(2)]),
        (["no_candidate"], [a_ulid(1)]),
    )


@pytest.mark.parametrize("when", When)
async def test_a_rotation_of_unknown_outcome_is_finished_by_repeating_it(
    env: Context, when: When
) -> None:
    fault = Fault(1, when, only="commit")
    with pytest.raises(Unavailable):
        await rotate(with_fault(env, fault), 1)

    key = await rotate(env, 1)

    assert await kids(env) == [a_ulid(1)]
    assert (await webhook.open_secrets(env, CALLER))[0].key == key.secret
