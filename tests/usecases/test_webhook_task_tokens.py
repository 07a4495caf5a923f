"""Task tokens: the end of a run ends the task of a state machine that waits for it, once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec
import pytest

from conveyor.domain.changes import JobKey, NoticeKey
from conveyor.domain.ids import RunId
from conveyor.domain.model import Notice, NoticeChannel, NoticeStatus, Webhook
from conveyor.ports.webhook_sender import Callback, Delivered, NotDelivered
from conveyor.usecases import webhook
from conveyor.usecases import webhook as webhooks
from conveyor.usecases.context import Context
from conveyor.usecases.run import rerun, runs
from conveyor.usecases.submit import jobs
from conveyor.usecases.submit.jobs import Accepted
from tests.builders import CALLER, ManualClock
from tests.usecases.test_webhook_delivery import Receiver
from tests.usecases.world import submit, work

TOKEN = "AQCEAAAAKgAAAAMAAAAA"
HOOK = Webhook("https://example.com/hook")


@dataclass
class Machine:
    """State machines with scripted answers that record the callbacks."""

    answers: list[Delivered | NotDelivered] = field(default_factory=list)
    callbacks: list[Callback] = field(default_factory=list)

    async def call_back(self, callback: Callback) -> Delivered | NotDelivered:
        self.callbacks.append(callback)
        return self.answers.pop(0) if self.answers else Delivered(200)


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def workflow_env(env: Context, machine: Machine) -> Context:
    """The ports with a client of these state machines."""
    return replace(env, workflows=machine)


async def deliver_due(env: Context, receiver: Receiver | None = None) -> None:
    for notice in await webhook.due(env, limit=10):
        ready = await webhook.prepare(env, notice)
        if ready is not None:
            await webhook.deliver(env, receiver or Receiver([]), ready)


async def an_ended_run(env: Context, webhook: Webhook | None = None) -> Accepted:
    accepted = await submit(env, 2, task_token=TOKEN, webhook=webhook)
    await work(env, accepted.run)
    return accepted


async def callback_of(env: Context, accepted: Accepted) -> Notice:
    page = await webhooks.page(env, CALLER, accepted.job.job_id, cursor=None, limit=10)
    (notice,) = [n for n in page.notices if n.channel is NoticeChannel.STEP_FUNCTIONS]
    return notice


async def test_a_completed_run_reports_success_with_a_summary(
    workflow_env: Context, machine: Machine
) -> None:
    accepted = await an_ended_run(workflow_env)

    await deliver_due(workflow_env)
    await deliver_due(workflow_env)

    (callback,) = machine.callbacks
    summary = msgspec.json.decode(callback.payload)
    assert (callback.token, callback.is_success) == (TOKEN, True)
    assert summary["job_id"] == accepted.job.job_id
    assert summary["run_id"] == accepted.run.run_id
    assert summary["status"] == "completed"
    assert (summary["stats"]["total"], summary["stats"]["successful"]) == (2, 2)
    assert (await callback_of(workflow_env, accepted)).status is NoticeStatus.DELIVERED


async def test_a_stopped_run_reports_failure(workflow_env: Context, machine: Machine) -> None:
    accepted = await submit(workflow_env, 2, task_token=TOKEN)
    await runs.stop(workflow_env, CALLER, accepted.job.job_id)

    await deliver_due(workflow_env)

    (callback,) = machine.callbacks
    assert (callback.is_success, callback.event_type) == (False, "run.stopped")
    assert msgspec.json.decode(callback.payload)["status"] == "stopped"


async def test_a_rerun_sends_no_callback(workflow_env: Context, machine: Machine) -> None:
    accepted = await an_ended_run(workflow_env)
    await deliver_due(workflow_env)

    again = await rerun.rerun(
        workflow_env, CALLER, accepted.job.job_id, run_id=RunId(workflow_env.new_id())
    )
    await work(workflow_env, again.run)
    await deliver_due(workflow_env)

    assert len(machine.callbacks) == 1


async def test_a_state_machine_task_that_has_ended_is_not_called_again(
    workflow_env: Context, machine: Machine
) -> None:
    machine.answers = [NotDelivered("step_functions:TaskTimedOut", 400, gone=True)]
    accepted = await an_ended_run(workflow_env)

    await deliver_due(workflow_env)

    notice = await callback_of(workflow_env, accepted)
    assert notice.status is NoticeStatus.EXHAUSTED
    assert notice.last_error == "step_functions:TaskTimedOut"


async def test_other_refusals_are_retried_with_the_delays_of_webhooks(
    workflow_env: Context, machine: Machine, clock: ManualClock
) -> None:
    machine.answers = [NotDelivered("step_functions:AccessDeniedException", 400)]
    accepted = await an_ended_run(workflow_env)

    await deliver_due(workflow_env)
    await deliver_due(workflow_env)
    clock.advance(6)
    await deliver_due(workflow_env)

    notice = await callback_of(workflow_env, accepted)
    assert [attempt.error for attempt in notice.tries] == [
        "step_functions:AccessDeniedException",
        None,
    ]
    assert notice.status is NoticeStatus.DELIVERED


async def test_a_failing_webhook_does_not_delay_the_callback(
    workflow_env: Context, machine: Machine
) -> None:
    accepted = await an_ended_run(workflow_env, HOOK)

    await deliver_due(workflow_env, Receiver([NotDelivered("http_5xx:500", 500)]))

    assert len(machine.callbacks) == 1
    assert (await callback_of(workflow_env, accepted)).status is NoticeStatus.DELIVERED


async def test_a_failing_callback_does_not_delay_the_webhook(
    workflow_env: Context, machine: Machine
) -> None:
    machine.answers = [NotDelivered("transport_error:step functions")]
    receiver = Receiver([Delivered(200)])
    await an_ended_run(workflow_env, HOOK)

    await deliver_due(workflow_env, receiver)

    assert len(receiver.deliveries) == 1


async def test_removing_the_webhook_keeps_the_callback(
    workflow_env: Context, machine: Machine
) -> None:
    accepted = await an_ended_run(workflow_env, HOOK)

    await webhooks.remove(workflow_env, CALLER, accepted.job.job_id)
    await deliver_due(workflow_env)

    assert len(machine.callbacks) == 1


async def test_a_callback_can_be_redelivered_by_hand(
    workflow_env: Context, machine: Machine
) -> None:
    machine.answers = [NotDelivered("step_functions:InvalidToken", 400, gone=True)]
    accepted = await an_ended_run(workflow_env)
    await deliver_due(workflow_env)
    notice = await callback_of(workflow_env, accepted)

    await webhooks.redeliver(workflow_env, CALLER, accepted.job.job_id, notice.notice_id)
    await deliver_due(workflow_env)

    assert (await callback_of(workflow_env, accepted)).status is NoticeStatus.DELIVERED


async def test_the_token_is_stored_encrypted_in_the_job_and_nowhere_else(
    workflow_env: Context, machine: Machine
) -> None:
    accepted = await an_ended_run(workflow_env)

    job = await workflow_env.store.read(JobKey(accepted.job.job_id))
    notice = await workflow_env.store.read(
        NoticeKey((await callback_of(workflow_env, accepted)).notice_id)
    )

    assert job is not None
    assert job.task_token_sealed is not None
    assert TOKEN not in repr((job, notice))


async def test_a_deleted_job_removes_its_token_and_sends_no_callback(
    workflow_env: Context, machine: Machine
) -> None:
    accepted = await an_ended_run(workflow_env)

    await jobs.delete(workflow_env, CALLER, accepted.job.job_id)
    await deliver_due(workflow_env)

    job = await workflow_env.store.read(JobKey(accepted.job.job_id))
    assert machine.callbacks == []
    assert job is not None
    assert job.task_token_sealed is None


async def test_a_callback_waits_while_its_token_cannot_be_decrypted(
    workflow_env: Context, machine: Machine
) -> None:
    accepted = await an_ended_run(workflow_env)
    foreign = workflow_env.secret_box.seal(b"{}", place="elsewhere")
    notice = await callback_of(workflow_env, accepted)
    job = msgspec.structs.replace(accepted.job, task_token_sealed=foreign)
    ready = webhook.DueDelivery(notice, webhook.TaskToken(foreign), job)

    await webhook.deliver(workflow_env, Receiver([]), ready)

    waiting = await callback_of(workflow_env, accepted)
    assert machine.callbacks == []
    assert (waiting.status, waiting.last_error) == (NoticeStatus.DUE, "task_token_unavailable")
