"""Profiles: properties of a whole world, beside its faults (docs/simulator.md, Profiles).

One world in eight has no faults of engines, processes or clocks, so that nothing there may happen
twice or late. In other worlds keys and exports lapse while a process works on them, one missed
heartbeat is enough to lose a claim, or lists must be short. In every second world clients hardly
pause; in every second one they do some things far more often.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from conveyor.simulation.options import Options

NEVER_S = 1e9
HASTY_KEYS = {"IDEMPOTENCY_CLAIM_S": 1.0, "EXPORT_CLAIM_S": 1.0}
IDLE_S_MAX = 10.0
"""Between two looks into an empty queue: else these are most of what happens."""
SHORT_LIVES = {"LEASE_TTL_S": 21.0, "VISIBILITY_S": 22.0, "CLAIM_TTL_S": 23.0}
SHORT_LISTS = {"TASKS_MAX": 30}

EVEN = "even"
TEMPERS: Mapping[str, Mapping[str, int]] = {
    EVEN: {},
    "tidy": {
        "delete_a_job": 8,
        "delete_a_run": 8,
        "delete_a_list_under_way": 8,
        "delete_what_another_run_shows": 16,
    },
    "restless": {
        "rerun_a_job": 8,
        "stop_a_list_under_way": 8,
        "pause_a_job": 8,
        "stop_a_job": 4,
        "do_two_things_at_once": 4,
    },
    "thrifty": {"submit_under_a_budget": 20, "change_a_budget": 20},
    "polite": {"submit_with_host_limits": 20},
    "punctual": {"submit_a_scheduled_job": 20},
    "collecting": {"export_a_run": 20, "fetch_an_export": 4, "look_around": 4},
    "uploading": {"upload_a_list": 10, "submit_an_uploaded_list": 20},
    "adding": {
        "submit_an_open_job": 4,
        "add_a_list": 6,
        "close_a_job": 4,
        "pause_a_job": 4,
        "do_two_things_at_once": 10,
    },
}
"""How many times as often clients do what, by the names of their actions."""

_OUTSIDE = ("site_", "receiver_", "client_", "list_", "account_")


def with_profile(options: Options) -> Options:
    """Drawn by itself, so that it moves nothing else that a seed stands for."""
    random = Random(f"mood {options.seed}")
    temper = random.choice((*TEMPERS, *(EVEN,) * (len(TEMPERS) - 2)))
    options = msgspec.structs.replace(options, haste=random.choice((1.0, 10.0)), temper=temper)
    if random.random() < 0.125:
        options = spared(options)
    elif random.random() < 0.25:
        return msgspec.structs.replace(options, limits=HASTY_KEYS)
    if random.random() < 0.3:
        return msgspec.structs.replace(options, limits=SHORT_LIVES)
    if random.random() < 0.1:
        return msgspec.structs.replace(options, limits=SHORT_LISTS, sync_tasks_max=5)
    return options


def spared(options: Options) -> Options:
    """The same world, without what happens to engines, processes and clocks."""
    rates = {
        name: rate if name.startswith(_OUTSIDE) else 0.0 for name, rate in options.rates.items()
    }
    return msgspec.structs.replace(
        options,
        is_spared=True,
        next_release={},
        disturb_s=NEVER_S,
        offset_s=0.0,
        drift=0.0,
        step_s=0.0,
        pessimism=type(options.pessimism)(),
        rates=rates,
    )
