"""The laws of the cache: one reads for all, and nobody is shown what is older than was shown."""

from __future__ import annotations

from conveyor.ports.cache import Cache, CachedValue, ReadTicket
from tests.builders import ManualClock

TTL_S = 1.0


async def ticket_of(cache: Cache, *, version: str = "1", insists: bool = False) -> ReadTicket:
    ticket = await cache.get("run", version, ttl_s=TTL_S, insists=insists)
    assert isinstance(ticket, ReadTicket)
    return ticket


async def look_up(cache: Cache, version: str = "1") -> CachedValue | ReadTicket | None:
    return await cache.get("run", version, ttl_s=TTL_S)


async def test_what_was_kept_is_found_under_its_name_and_version(cache: Cache) -> None:
    text = '{"done": 5, "reasons": {}}'

    stood = await cache.put("run", await ticket_of(cache), text)

    assert stood is None
    assert await look_up(cache) == CachedValue(text)
    assert isinstance(await cache.get("other", "1", ttl_s=TTL_S), ReadTicket)
    assert isinstance(await look_up(cache, version="2"), ReadTicket)
    assert await look_up(cache, version="2") is None


async def test_its_life_begins_with_its_ticket(cache: Cache, clock: ManualClock) -> None:
    ticket = await ticket_of(cache)
    clock.advance(0.9)
    await cache.put("run", ticket, "old")

    value = await look_up(cache)
    clock.advance(0.1)

    assert value == CachedValue("old")
    assert isinstance(await look_up(cache), ReadTicket)


async def test_a_ticket_that_has_lapsed_keeps_nothing(cache: Cache, clock: ManualClock) -> None:
    ticket = await ticket_of(cache)
    clock.advance(1.0)

    stood = await cache.put("run", ticket, "old")

    assert stood is None
    assert isinstance(await look_up(cache), ReadTicket)


async def test_while_a_ticket_is_out_others_get_none_unless_they_insist(cache: Cache) -> None:
    await ticket_of(cache)

    waits = await look_up(cache)
    later = await ticket_of(cache, insists=True)
    await cache.put("run", later, "new")

    assert waits is None
    assert await cache.get("run", "1", ttl_s=TTL_S, insists=True) == CachedValue("new")


async def test_who_keeps_too_late_is_answered_what_stands(cache: Cache) -> None:
    early = await ticket_of(cache)
    await cache.put("run", await ticket_of(cache, insists=True), "later")

    stood = await cache.put("run", early, "early")

    assert stood == CachedValue("later")
    assert await look_up(cache) == CachedValue("later")


async def test_who_keeps_too_late_spoils_what_is_being_read(cache: Cache) -> None:
    early = await ticket_of(cache)
    later = await ticket_of(cache, insists=True)

    stood = [await cache.put("run", ticket, "text") for ticket in (early, later)]

    assert stood == [None, None]
    assert isinstance(await look_up(cache), ReadTicket)


async def test_what_is_forgotten_is_not_found_nor_kept(cache: Cache) -> None:
    await cache.put("run", await ticket_of(cache), "old")
    await cache.delete("run")
    ticket = await ticket_of(cache)
    await cache.delete("run")

    stood = await cache.put("run", ticket, "older")

    assert stood is None
    assert isinstance(await look_up(cache), ReadTicket)
