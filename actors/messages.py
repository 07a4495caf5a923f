"""Every message that actors send each other, grouped by who hears it
(docs/architecture.md, The worker).

Commands are imperative, facts are in the past tense. A message may carry a live cancel scope or
a reply slip; nothing here is ever stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import trio

from actors.limiters.api_key_limiter import CallPermit
from actors.poller.budget import CallReservation
from actors.runtime import Reply
from conveyor.domain.changes import Change
from conveyor.domain.ids import JobId, LeaseId, RunId
from conveyor.domain.model import Batch, Job, Run, Task, TaskRef
from conveyor.domain.run.settlement import Claim, SettleVerdict
from conveyor.domain.run.wait_reason import WaitReason
from conveyor.ports.queue import Message
from conveyor.ports.worker_signals import TeardownResult


@dataclass(frozen=True, slots=True)
class TaskAssignment:
    """One message in hand, under one lease, and what came of claiming its task.

    `make_room` passes slot and lease on to the next task: nothing is left to do but to write. It
    answers False where they stay with this one. `defer` tells the poller that no task of the run
    can be tried for so many seconds, or for a while where the number is None.
    `toll` is what its call may spend, where the run has a budget; `visit_id` its lease at a host
    that takes few at a time; `permit` its right to call a remote gateway.
    """

    job: Job
    run: Run
    message: Message
    lease_id: LeaseId
    claim: Claim
    release_early: Callable[[], bool]
    defer: Callable[[WaitReason, str, float | None], None]
    reservation: CallReservation | None = None
    host_lease_id: LeaseId | None = None
    permit: CallPermit | None = None


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep this alive: a lease, a message and a claim, and the work that needs all three.

    Without a lease it replaces the hold of a task that has its page and only has to write it.
    """

    lease_id: LeaseId | None
    message: Message
    claim: int
    work: trio.CancelScope
    host_lease_id: LeaseId | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """The work on this message is over. The reply comes when no beat can touch it any more."""

    receipt: str
    reply: Reply[None] | None = None


HeartbeaterMessage = Hold | Release


@dataclass(frozen=True, slots=True)
class Settle:
    """Write this change of a claimed task, then ack its message if the task is over.

    A settle without a message is one whose message goes back to the queue.
    """

    ref: TaskRef
    task: Task
    change: Change
    message: Message | None
    reply: Reply[SettleVerdict]


ShardWriterMessage = Settle


@dataclass(frozen=True, slots=True)
class RunUpdated:
    """How the run's row stands now. `is_signalled` when a change was reported, which the row need
    not show; otherwise a scan came by, and the row may be as it was."""

    run: Run
    is_signalled: bool = False


PollerMessage = RunUpdated


@dataclass(frozen=True, slots=True)
class RunChanged:
    """Something happened to a run: it is new, fed, paused, resumed, asked to stop, or over."""

    job_id: JobId
    run_id: RunId


@dataclass(frozen=True, slots=True)
class TearDown:
    """End all work on a run and say what was let go."""

    job_id: JobId
    run_id: RunId
    reply: Reply[TeardownResult]


DiscoveryMessage = RunChanged | TearDown


@dataclass(frozen=True, slots=True)
class BatchOpened:
    """A list waits to be ingested."""

    job_id: JobId
    run_id: RunId


@dataclass(frozen=True, slots=True)
class BatchStalled:
    """Nobody has moved this batch for a while."""

    batch: Batch


StreamerMessage = BatchOpened | BatchStalled
