"""The catalogue of faults, their rates in one world, and how often each occurred
(docs/simulator.md, Faults).

To add a fault: name it here, draw its rate in options.py, and call `occurs` (or `count`) where it
happens. A suite of many seeds in which a fault never occurred fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from random import Random


class Fault(StrEnum):
    """Every fault, in the order of docs/simulator.md. `ONLY_ON` has the engines of those that not
    every engine can have."""

    CALL_REFUSED = "call_refused"
    ANSWER_LOST = "answer_lost"
    CALL_SLOW = "call_slow"
    KILLED_BEFORE = "killed_before"
    KILLED_AFTER = "killed_after"
    ACTOR_CRASHED = "actor_crashed"
    PAUSED = "paused"
    TERMINATED = "terminated"
    RESTART_STORM = "restart_storm"
    SCALED_TO_NONE = "scaled_to_none"
    OUTAGE = "outage"
    CLOCK_OFFSET = "clock_offset"
    CLOCK_DRIFT = "clock_drift"
    CLOCK_STEPPED = "clock_stepped"
    CLOCK_PUT_BACK = "clock_put_back"
    FALSE_EMPTY = "false_empty"
    EARLY_RETURN = "early_return"
    DUPLICATE_DELIVERY = "duplicate_delivery"
    LEASES_LOST = "leases_lost"
    BEAT_SKIPPED = "beat_skipped"
    COMMIT_FAILED = "commit_failed"
    DISK_FULL = "disk_full"
    READ_FAILED = "read_failed"
    READ_BUSY = "read_busy"
    BODY_TORN = "body_torn"
    SITE_NOT_FOUND = "site_not_found"
    SITE_BLOCKED = "site_blocked"
    SITE_FAILED = "site_failed"
    SITE_RATE_LIMITED = "site_rate_limited"
    SITE_HUNG = "site_hung"
    SITE_DRIPPED = "site_dripped"
    SITE_RESET = "site_reset"
    SITE_WRONG_LENGTH = "site_wrong_length"
    SITE_EMPTY = "site_empty"
    SITE_TOO_LARGE = "site_too_large"
    SITE_ENDLESS = "site_endless"
    SITE_REDIRECTED = "site_redirected"
    SITE_TLS_FAILED = "site_tls_failed"
    ACCOUNT_SPENT = "account_spent"
    RECEIVER_FAILED = "receiver_failed"
    RECEIVER_HUNG = "receiver_hung"
    RECEIVER_RESET = "receiver_reset"
    RECEIVER_REDIRECTED = "receiver_redirected"
    RECEIVER_RATE_LIMITED = "receiver_rate_limited"
    RECEIVER_GONE = "receiver_gone"
    RECEIVER_TO_METADATA = "receiver_to_metadata"
    RECEIVER_DRIPPED = "receiver_dripped"
    RECEIVER_TOO_LARGE = "receiver_too_large"
    CLIENT_REPEATED = "client_repeated"
    CLIENT_REPEATED_AT_ONCE = "client_repeated_at_once"
    CLIENT_HUNG_UP = "client_hung_up"
    CLIENT_REUSED_KEY = "client_reused_key"
    LIST_OVERWRITTEN = "list_overwritten"
    SMALL_CHUNKS = "small_chunks"
    SMALL_PAGES = "small_pages"
    FEW_SHARDS = "few_shards"
    MANY_SHARDS = "many_shards"
    ONE_IN_FLIGHT = "one_in_flight"
    HASTY_SWEEPER = "hasty_sweeper"
    ONE_MESSAGE_POLLS = "one_message_polls"
    NEVER_AT_ONCE = "never_at_once"
    ONE_SETTLE_A_COMMIT = "one_settle_a_commit"
    HASTY_KEYS = "hasty_keys"
    SHORT_LIVES = "short_lives"
    SHORT_LISTS = "short_lists"
    RELEASES_MIXED = "releases_mixed"
    STORAGE_FULL = "storage_full"
    STORAGE_MISSING = "storage_missing"
    STORAGE_DENIED = "storage_denied"
    GATEWAY_UNREACHABLE = "gateway_unreachable"
    GATEWAY_FAILING = "gateway_failing"
    GATEWAY_LIMITED = "gateway_limited"
    GATEWAY_LIED = "gateway_lied"
    TASK_POISONED = "task_poisoned"
    ODD_VALUES = "odd_values"
    OVER_QUOTAS = "over_quotas"
    TAR_PITS = "tar_pits"
    IDLE_JOBS = "idle_jobs"
    ENDLESS_RERUNS = "endless_reruns"
    OUT_OF_RESOURCES = "out_of_resources"
    LATE_ANSWERS = "late_answers"
    POWER_CUT = "power_cut"
    CLOCK_LEAPT = "clock_leapt"
    CLOCK_LEAPT_BACK = "clock_leapt_back"


ONLY_ON: Mapping[Fault, frozenset[str]] = {
    # The models of AWS services have call faults of their own, below the engine, so the fault
    # injector of the process adds none.
    Fault.CALL_REFUSED: frozenset({"memory", "embedded", "mixed"}),
    Fault.ANSWER_LOST: frozenset({"memory", "embedded", "mixed"}),
    Fault.CALL_SLOW: frozenset({"memory", "embedded", "mixed"}),
    Fault.FALSE_EMPTY: frozenset({"memory", "embedded"}),
    Fault.EARLY_RETURN: frozenset({"memory", "embedded"}),
    Fault.DUPLICATE_DELIVERY: frozenset({"memory", "embedded"}),
    Fault.COMMIT_FAILED: frozenset({"embedded"}),
    Fault.DISK_FULL: frozenset({"embedded"}),
    Fault.READ_FAILED: frozenset({"embedded"}),
    Fault.READ_BUSY: frozenset({"embedded"}),
    Fault.BODY_TORN: frozenset({"embedded"}),
    Fault.POWER_CUT: frozenset({"embedded"}),
    Fault.LEASES_LOST: frozenset({"memory", "aws", "mixed"}),
    Fault.CLOCK_OFFSET: frozenset({"memory", "aws", "mixed"}),
    Fault.CLOCK_DRIFT: frozenset({"memory", "aws", "mixed"}),
}
"""The faults that only some engines can have."""


class Faults:
    """The fault rates of one world, and how often each fault occurred. Once faults are over
    (`is_calm`), none occurs."""

    def __init__(self, rates: Mapping[Fault, float], random: Random) -> None:
        self._rates = dict(rates)
        self._random = random
        self.counts: Counter[Fault] = Counter()
        self.is_calm = False
        self._outages = 0
        self.storage_outage: Fault | None = None

    @property
    def is_outage(self) -> bool:
        return self._outages > 0 and not self.is_calm

    def begin_outage(self) -> None:
        """From now on every engine call fails, until `end_outage`. Outages may overlap."""
        self._outages += 1

    def end_outage(self) -> None:
        self._outages -= 1

    @property
    def storage_fault(self) -> Fault | None:
        """The current fault of body storage, if there is one."""
        return None if self.is_calm else self.storage_outage

    def occurs(self, fault: Fault) -> bool:
        """Draws whether the fault occurs this time, and counts it if it does."""
        rate = 0.0 if self.is_calm else self._rates.get(fault, 0.0)
        if rate == 0.0 or self._random.random() >= rate:
            return False
        self.counts[fault] += 1
        return True

    def count(self, fault: Fault) -> None:
        """Counts a fault that occurred without a draw here."""
        self.counts[fault] += 1

    def stop_faults(self) -> None:
        """From now on no fault occurs."""
        self.is_calm = True
