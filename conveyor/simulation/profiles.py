"""Profiles: properties of a whole world, beside its fault rates (docs/simulator.md, Profiles).

One world in eight has no faults of engines, processes or clocks; nothing there may happen twice or
late. In other worlds claims on keys and exports expire while a process works on them, one missed
heartbeat is enough to lose a claim, or lists may only be short. In every second world clients
hardly pause, and in every second one they prefer some actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from conveyor.simulation.options import Options

# Far beyond the end of every world.
NEVER_S = 1e9
# Claims that expire within a second: several processes then finish the same work.
HASTY_KEYS = {"IDEMPOTENCY_CLAIM_S": 1.0, "EXPORT_CLAIM_S": 1.0}
IDLE_S_MAX = 10.0
"""The longest pause between two polls of an empty queue. With a shorter one, polls would be most of
the trace."""
# A little more than two heartbeats of 10 s: one missed heartbeat and a slow call lose a claim. The
# order is that of the real values.
SHORT_LIVES = {"LEASE_TTL_S": 21.0, "VISIBILITY_S": 22.0, "CLAIM_TTL_S": 23.0}
# Many lists are longer than 30 lines, and are refused while they are ingested.
SHORT_LISTS = {"TASKS_MAX": 30}

EVEN = "even"
CLIENT_PROFILES: Mapping[str, Mapping[str, int]] = {
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
"""For each profile, the actions that its clients draw more often, and how many times as often."""

# The faults of sites, receivers and clients: they are not faults of the service itself.
_OUTSIDE = ("site_", "receiver_", "client_", "list_", "account_")


def with_profile(options: Options) -> Options:
    """Applies a drawn profile. It has a random stream of its own, so it changes nothing else that
    the seed decides."""
    # The name of a stream decides what it draws: another name would change every recorded world.
    random = Random(f"mood {options.seed}")
    client_profile = random.choice((*CLIENT_PROFILES, *(EVEN,) * (len(CLIENT_PROFILES) - 2)))
    options = msgspec.structs.replace(
        options, client_speed=random.choice((1.0, 10.0)), client_profile=client_profile
    )
    if random.random() < 0.125:
        options = without_internal_faults(options)
    elif random.random() < 0.25:
        return msgspec.structs.replace(options, limits=HASTY_KEYS)
    if random.random() < 0.3:
        return msgspec.structs.replace(options, limits=SHORT_LIVES)
    if random.random() < 0.1:
        return msgspec.structs.replace(options, limits=SHORT_LISTS, sync_tasks_max=5)
    return options


def without_internal_faults(options: Options) -> Options:
    """The same world without faults of engines, processes and clocks. Sites, receivers and clients
    still fail."""
    rates = {
        name: rate if name.startswith(_OUTSIDE) else 0.0 for name, rate in options.rates.items()
    }
    return msgspec.structs.replace(
        options,
        is_fault_free=True,
        next_release={},
        disturb_s=NEVER_S,
        offset_s=0.0,
        drift=0.0,
        step_s=0.0,
        service_rates=type(options.service_rates)(),
        rates=rates,
    )
