"""The laws of Cache: one reader reads for all, and no reader is shown an older value than
another."""

from __future__ import annotations

from conveyor.ports.cache import Cache, CachedValue, ReadTicket
from tests.builders import ManualClock

TTL_S = 1.0


async def get_ticket(cache: Cache, *, version: str = "1", insists: bool = False) -> ReadTicket:
    ticket = await cache.get("run", version, ttl_s=TTL_S, insists=insists)
    assert isinstance(ticket, ReadTicket)
    return ticket


async def get_value(cache: Cache, version: str = "1") -> CachedValue | ReadTicket | None:
    return await cache.get("run", version, ttl_s=TTL_S)


async def test_a_stored_value_is_found_under_its_name_and_version_only(cache: Cache) -> None:
    text = '{"done": 5, "reasons": {}}'

    current = await cache.put("run", await get_ticket(cache), text)

    assert current is None
    assert await get_value(cache) == CachedValue(text)
    assert isinstance(await cache.get("other", "1", ttl_s=TTL_S), ReadTicket)
    assert isinstance(await get_value(cache, version="2"), ReadTicket)
    assert await get_value(cache, version="2") is None


async def test_the_lifetime_of_a_value_starts_with_its_ticket(
    cache: Cache, clock: ManualClock
) -> None:
    ticket = await get_ticket(cache)
    clock.advance(0.9)
    await cache.put("run", ticket, "old")

    value = await get_value(cache)
    clock.advance(0.1)

    assert value == CachedValue("old")
    assert isinstance(await get_value(cache), ReadTicket)


async def test_an_expired_ticket_stores_nothing(cache: Cache, clock: ManualClock) -> None:
    ticket = await get_ticket(cache)
    clock.advance(1.0)

    current = await cache.put("run", ticket, "old")

    assert current is None
    assert isinstance(await get_value(cache), ReadTicket)


async def test_while_a_ticket_is_issued_other_readers_get_none_unless_they_insist(
    cache: Cache,
) -> None:
    await get_ticket(cache)

    waits = await get_value(cache)
    later = await get_ticket(cache, insists=True)
    await cache.put("run", later, "new")

    assert waits is None
    assert await cache.get("run", "1", ttl_s=TTL_S, insists=True) == CachedValue("new")


async def test_a_put_with_an_outdated_ticket_returns_the_current_value(cache: Cache) -> None:
    early = await get_ticket(cache)
    await cache.put("run", await get_ticket(cache, insists=True), "later")

    current = await cache.put("run", early, "early")

    assert current == CachedValue("later")
    assert await get_value(cache) == CachedValue("later")


async def test_a_put_with_an_outdated_ticket_invalidates_the_newest_ticket(cache: Cache) -> None:
    early = await get_ticket(cache)
    later = await get_ticket(cache, insists=True)

    current = [await cache.put("run", ticket, "text") for ticket in (early, later)]

    assert current == [None, None]
    assert isinstance(await get_value(cache), ReadTicket)


async def test_a_value_read_before_a_delete_is_neither_found_nor_stored(cache: Cache) -> None:
    await cache.put("run", await get_ticket(cache), "old")
    await cache.delete("run")
    ticket = await get_ticket(cache)
    await cache.delete("run")

    current = await cache.put("run", ticket, "older")

    assert current is None
    assert isinstance(await get_value(cache), ReadTicket)
