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

    CALL_REFUSED = "call_refused"  #: An engine call fails before it has an effect.
    ANSWER_LOST = "answer_lost"  #: An engine call takes effect, and its answer is lost.
    CALL_SLOW = "call_slow"  #: An engine call takes 1 to 30 s.
    KILLED_BEFORE = "killed_before"  #: A process is killed before an engine call takes effect.
    KILLED_AFTER = "killed_after"  #: A process is killed after an engine call took effect.
    #: An engine call raises an unexpected error, which crashes the actor that made it.
    ACTOR_CRASHED = "actor_crashed"
    PAUSED = "paused"  #: A process stops for 20 to 120 s in its next engine call.
    TERMINATED = "terminated"  #: A process gets SIGTERM.
    RESTART_STORM = "restart_storm"  #: All processes are killed at once.
    SCALED_TO_NONE = "scaled_to_none"  #: All workers are terminated and stay away for a while.
    OUTAGE = "outage"  #: No engine call of any process is answered for 2 to 60 s.
    CLOCK_OFFSET = "clock_offset"  #: The wall clocks of processes differ by up to 10 s.
    CLOCK_DRIFT = "clock_drift"  #: The wall clocks of processes run at different speeds.
    CLOCK_STEPPED = "clock_stepped"  #: A wall clock is set up to 60 s ahead.
    CLOCK_PUT_BACK = "clock_put_back"  #: A wall clock is set up to 60 s back.
    FALSE_EMPTY = "false_empty"  #: A receive returns nothing although the queue has messages.
    #: The visibility timeout of a received message is up to 10 % too short or too long.
    EARLY_RETURN = "early_return"
    #: A received message stays visible, so it is delivered again.
    DUPLICATE_DELIVERY = "duplicate_delivery"
    LEASES_LOST = "leases_lost"  #: The coordinator loses leases, as in a failover.
    BEAT_SKIPPED = "beat_skipped"  #: A heartbeat fails.
    COMMIT_FAILED = "commit_failed"  #: A commit fails with an I/O error.
    DISK_FULL = "disk_full"  #: A commit fails because the disk is full.
    READ_FAILED = "read_failed"  #: A read fails with an I/O error.
    READ_BUSY = "read_busy"  #: A read finds the database locked.
    BODY_TORN = "body_torn"  #: The disk is full after half of a body was written.
    SITE_NOT_FOUND = "site_not_found"  #: A site answers 404.
    SITE_BLOCKED = "site_blocked"  #: A site answers 403.
    SITE_FAILED = "site_failed"  #: A site answers 503.
    SITE_RATE_LIMITED = "site_rate_limited"  #: A site answers 429 with Retry-After.
    SITE_HUNG = "site_hung"  #: A site never answers.
    SITE_DRIPPED = "site_dripped"  #: A site sends its answer so slowly that the deadline may pass.
    SITE_RESET = "site_reset"  #: A site resets the connection.
    SITE_WRONG_LENGTH = "site_wrong_length"  #: A body ends before its Content-Length.
    SITE_EMPTY = "site_empty"  #: A site answers with an empty body.
    SITE_TOO_LARGE = "site_too_large"  #: A body is larger than allowed.
    SITE_ENDLESS = "site_endless"  #: A body has no end.
    SITE_REDIRECTED = "site_redirected"  #: A site redirects the request.
    SITE_TLS_FAILED = "site_tls_failed"  #: The TLS handshake fails.
    ACCOUNT_SPENT = "account_spent"  #: The gateway answers that the account has no credits left.
    RECEIVER_FAILED = "receiver_failed"  #: A webhook receiver answers 500.
    RECEIVER_HUNG = "receiver_hung"  #: A receiver never answers.
    RECEIVER_RESET = "receiver_reset"  #: A receiver accepts no connection.
    RECEIVER_REDIRECTED = "receiver_redirected"  #: A receiver redirects to another host.
    RECEIVER_RATE_LIMITED = "receiver_rate_limited"  #: A receiver answers 429 with Retry-After.
    RECEIVER_GONE = "receiver_gone"  #: A receiver answers 410.
    #: A receiver redirects to the metadata service of a cloud.
    RECEIVER_TO_METADATA = "receiver_to_metadata"
    #: A receiver takes the event, and its answer may come after the deadline.
    RECEIVER_DRIPPED = "receiver_dripped"
    RECEIVER_TOO_LARGE = "receiver_too_large"  #: A receiver answers with a body that is too large.
    CLIENT_REPEATED = "client_repeated"  #: A client sends a request again that was answered.
    #: A client sends a request three times, twice at the same time.
    CLIENT_REPEATED_AT_ONCE = "client_repeated_at_once"
    CLIENT_HUNG_UP = "client_hung_up"  #: A client disconnects before its answer.
    #: A client sends another request with a used idempotency key.
    CLIENT_REUSED_KEY = "client_reused_key"
    #: A client replaces an uploaded list after it submitted the list.
    LIST_OVERWRITTEN = "list_overwritten"
    SMALL_CHUNKS = "small_chunks"  #: Lists are ingested one line at a time.
    SMALL_PAGES = "small_pages"  #: Pages of results have at most three rows at first.
    FEW_SHARDS = "few_shards"  #: Jobs have one or two shards.
    MANY_SHARDS = "many_shards"  #: Jobs have 16 shards.
    ONE_IN_FLIGHT = "one_in_flight"  #: By default a job has one fetch in flight.
    HASTY_SWEEPER = "hasty_sweeper"  #: The sweeper runs every 5 s or every second.
    ONE_MESSAGE_POLLS = "one_message_polls"  #: A poll receives one message at most.
    NEVER_AT_ONCE = "never_at_once"  #: No list is stored in one transaction with its job.
    ONE_SETTLE_A_COMMIT = "one_settle_a_commit"  #: Each settle is a commit of its own.
    HASTY_KEYS = "hasty_keys"  #: Claims on keys and exports expire after one second.
    SHORT_LIVES = "short_lives"  #: Leases and claims expire soon after two heartbeats.
    SHORT_LISTS = "short_lists"  #: Lists may have 30 lines.
    #: A process runs another release, with other chunk sizes and shard counts.
    RELEASES_MIXED = "releases_mixed"
    STORAGE_FULL = "storage_full"  #: Body storage has no room for minutes.
    STORAGE_MISSING = "storage_missing"  #: Body storage does not exist for minutes.
    STORAGE_DENIED = "storage_denied"  #: Body storage refuses access for minutes.
    GATEWAY_UNREACHABLE = "gateway_unreachable"  #: The gateway accepts no connection for minutes.
    GATEWAY_FAILING = "gateway_failing"  #: The gateway answers every call with a 5xx for minutes.
    #: The gateway refuses a call because its key has too many in flight.
    GATEWAY_LIMITED = "gateway_limited"
    GATEWAY_LIED = "gateway_lied"  #: The gateway sends a false `Concurrency-*` header.
    TASK_POISONED = "task_poisoned"  #: A page crashes its handler each time.
    ODD_VALUES = "odd_values"  #: A hostile caller sends senseless values.
    OVER_QUOTAS = "over_quotas"  #: A hostile caller exceeds its quotas.
    TAR_PITS = "tar_pits"  #: A hostile caller fetches from a site that never answers.
    IDLE_JOBS = "idle_jobs"  #: A hostile caller opens jobs and adds nothing.
    ENDLESS_RERUNS = "endless_reruns"  #: A hostile caller requests reruns and exports without end.
    OUT_OF_RESOURCES = "out_of_resources"  #: A process has no file descriptor for a fetch.
    #: A hostile caller's site leaves a second answer on its connection.
    LATE_ANSWERS = "late_answers"
    POWER_CUT = "power_cut"  #: All processes end, and everything that was not synced is lost.
    CLOCK_LEAPT = "clock_leapt"  #: Wall clocks leap ahead by an hour, a day or 40 days.
    CLOCK_LEAPT_BACK = "clock_leapt_back"  #: Wall clocks leap back by an hour, a day or 40 days.


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
