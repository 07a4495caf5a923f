"""Moods: what some worlds are like as a whole, whatever faults they have (SPEC 6.14).

One in eight is spared: nothing happens there to engines, processes or clocks. What is done twice or
late in such a world has no excuse. In others keys lapse while their first call is at work, or one
missed beat is enough to lose a claim. In every other world clients hardly pause.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from conveyor.simulation.options import Options

NEVER_S = 1e9
HASTY_KEYS = {"IDEMPOTENCY_CLAIM_S": 1.0}
IDLE_S_MAX = 10.0
"""Between two looks into an empty queue: else these are most of what happens."""
SHORT_LIVES = {"LEASE_TTL_S": 21.0, "VISIBILITY_S": 22.0, "CLAIM_TTL_S": 23.0}

_OUTSIDE = ("site_", "receiver_", "client_", "list_", "account_")


def with_mood(options: Options) -> Options:
    """Drawn by itself, so that it moves nothing else that a seed stands for."""
    random = Random(f"mood {options.seed}")
    options = msgspec.structs.replace(options, haste=random.choice((1.0, 10.0)))
    if random.random() < 0.125:
        return _spared(options)
    if random.random() < 0.25:
        return msgspec.structs.replace(options, limits=HASTY_KEYS)
    if random.random() < 0.3:
        return msgspec.structs.replace(options, limits=SHORT_LIVES)
    return options


def _spared(options: Options) -> Options:
    rates = {
        name: rate if name.startswith(_OUTSIDE) else 0.0 for name, rate in options.rates.items()
    }
    return msgspec.structs.replace(
        options,
        is_spared=True,
        disturb_s=NEVER_S,
        offset_s=0.0,
        drift=0.0,
        step_s=0.0,
        pessimism=type(options.pessimism)(),
        rates=rates,
    )
