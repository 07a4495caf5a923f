"""The messages that actors send each other, grouped by receiver
(docs/architecture.md, The worker).

The name of a command is an imperative; the name of a fact is in the past tense. A message may carry
a live cancel scope or a Reply. No message is ever stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import trio

from actors.poller.permit import Permit
from actors.runtime import Reply
from conveyor.domain.changes import Change
from conveyor.domain.ids import JobId, LeaseId, RunId
from conveyor.domain.model import Batch, Job, Run, Task, TaskRef
from conveyor.domain.run.settlement import Claim, SettleVerdict
from conveyor.domain.run.wait_reason import WaitReason
from conveyor.ports.coordinator import TeardownResult
from conveyor.ports.queue import Message


@dataclass(frozen=True, slots=True)
class TaskAssignment:
    """One received message, the result of claiming its task, and the permit under which it runs.

    `defer` informs the poller that no task of the run can be tried for the given seconds, or for a
    default time if the number is None.
    """

    job: Job
    run: Run
    message: Message
    claim: Claim
    permit: Permit
    defer: Callable[[WaitReason, str, float | None], None]


@dataclass(frozen=True, slots=True)
class Hold:
    """Command: renew a lease, a message and a claim, and cancel `scope` if one of them is lost.

    A hold without leases replaces the earlier hold of a task that has its page and only has to
    write it. It is sent before the leases are released.
    """

    lease_id: LeaseId | None
    message: Message
    task: Task
    scope: trio.CancelScope
    host_lease_id: LeaseId | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """The work on this message has ended. The heartbeater replies when no heartbeat can affect the
    message any more."""

    receipt: str
    reply: Reply[None] | None = None


HeartbeaterMessage = Hold | Release


@dataclass(frozen=True, slots=True)
class Settle:
    """Command: write this change of a claimed task, then ack its message if the task has ended.

    A settle has no message if the task is tried again: its message is bounced. `is_last` is True if
    this process fetches nothing else of the run and can receive nothing more. `shard_count` is that
    of the run.
    """

    ref: TaskRef
    task: Task
    change: Change
    message: Message | None
    reply: Reply[SettleVerdict]
    is_last: bool = False
    shard_count: int = 1


ShardWriterMessage = Settle


@dataclass(frozen=True, slots=True)
class RunUpdated:
    """The current row of the run. `is_signalled` is True if a process reported a change, which the
    row need not show. It is False if a scan found the run; the row may then be unchanged.
    `is_owner` is False if only other workers are to poll the run from now on."""

    run: Run
    is_signalled: bool = False
    is_owner: bool = True


PollerMessage = RunUpdated


@dataclass(frozen=True, slots=True)
class RunChanged:
    """The run is new, has new tasks, was paused or resumed, has a stop request, or has ended.
    `tasks` is how many tasks a run with new tasks has."""

    job_id: JobId
    run_id: RunId
    tasks: int = 0


@dataclass(frozen=True, slots=True)
class TearDown:
    """Command: end all work on a run in this process and reply with what was released."""

    job_id: JobId
    run_id: RunId
    reply: Reply[TeardownResult]


DiscoveryMessage = RunChanged | TearDown


@dataclass(frozen=True, slots=True)
class BatchOpened:
    """A batch of the run is open and waits to be ingested."""

    job_id: JobId
    run_id: RunId


@dataclass(frozen=True, slots=True)
class BatchStalled:
    """No ingester has moved this open batch for some time."""

    batch: Batch


StreamerMessage = BatchOpened | BatchStalled
