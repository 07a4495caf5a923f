"""Counts: what a live run has done so far, for those who only look (SPEC.md 2.3).

Whoever decides anything reads the counters themselves (`totals_of`).
"""

from __future__ import annotations

from contextlib import suppress
from hashlib import blake2b

import msgspec
import trio

from conveyor.domain import limits
from conveyor.domain.lifecycle import RUN_LIVE
from conveyor.domain.model import Run
from conveyor.domain.totals import Totals
from conveyor.ports.cache import Cache, Found, Ticket
from conveyor.ports.errors import Unavailable
from conveyor.usecases.env import Env
from conveyor.usecases.lookups import totals_of

PATIENCE_S = 0.25
_LOOK_S = 0.02
_DECODER = msgspec.json.Decoder(Totals)


async def glance(env: Env, run: Run) -> Totals:
    """The run's counters, up to COUNTS_TTL_S old, and never older than what was shown before."""
    if env.cache is None or not _is_under_way(run):
        return await totals_of(env, run)
    found = await _look(env.cache, run)
    if isinstance(found, Found):
        return _DECODER.decode(found.text)
    totals = await totals_of(env, run)
    stands = None
    with suppress(Unavailable):
        if found is None:
            await env.cache.forget(run.run_id)
        else:
            text = msgspec.json.encode(totals).decode()
            stands = await env.cache.keep(run.run_id, found, text)
    return totals if stands is None else _DECODER.decode(stands.text)


async def outdate(env: Env, run: Run) -> None:
    """For who is about to show counters of its own reading: nobody is shown older ones then."""
    if env.cache is not None and _is_under_way(run):
        with suppress(Unavailable):
            await env.cache.forget(run.run_id)


async def _look(cache: Cache, run: Run) -> Found | Ticket | None:
    """None when nobody can be asked. Of many who come at once one reads, the others wait for it."""
    patient_until = trio.current_time() + PATIENCE_S
    with suppress(Unavailable):
        while True:
            insists = trio.current_time() >= patient_until
            found = await cache.look(
                run.run_id, _version(run), ttl_s=limits.COUNTS_TTL_S, insists=insists
            )
            if found is not None:
                return found
            await trio.sleep(_LOOK_S)
    return None


def _is_under_way(run: Run) -> bool:
    """It has all its lists, and is not about to end."""
    is_ending = run.status not in RUN_LIVE or run.stop_requested_at is not None
    return not is_ending and run.open_batches == 0


def _version(run: Run) -> str:
    """Whatever changes the run's row makes older counts unfit to be shown beside it."""
    return blake2b(msgspec.json.encode(run), digest_size=8).hexdigest()
