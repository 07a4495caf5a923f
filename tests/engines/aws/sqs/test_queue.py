"""Behaviour that only SQS has: partly refused batches, queues that are not visible yet, lost
answers."""

from __future__ import annotations

import json
from random import Random

import pytest

from conveyor.engines.aws.client.client import Params, RetryingAwsClient
from conveyor.engines.aws.errors import AwsError, NoResponse
from conveyor.engines.aws.sqs import FOREIGN_RECEIVES_MAX, SqsQueue, make_control_queues
from conveyor.ports.errors import QueueGone, Unavailable
from conveyor.ports.queue import Depth
from tests.aws import Faults, an_aws_client
from tests.builders import OTHER_RUN, RUN, ManualClock, ServerClock, a_ref
from tests.engines.aws.sqs.faulty_sqs import URL, FaultySqs


@pytest.fixture
def clock(autojump_clock: object) -> ManualClock:
    return ManualClock()


@pytest.fixture
def sqs(clock: ManualClock) -> FaultySqs:
    return FaultySqs(ServerClock(clock))


def a_queue(sqs: FaultySqs, faults: Faults | None = None) -> SqsQueue:
    client = an_aws_client(sqs, faults=faults)
    return SqsQueue(client=client, clock=sqs.clock, random=Random(1), prefix="conveyor-")


class LosesAnswers:
    """Loses the first answer to each of these operations, after the call took effect."""

    def __init__(self, *operations: str) -> None:
        self._left = set(operations)

    async def before(self, service: str, operation: str, params: Params) -> None:
        pass

    async def after(self, service: str, operation: str, params: Params) -> None:
        if operation in self._left:
            self._left.remove(operation)
            raise NoResponse("the connection closed", was_sent=True)


async def test_the_name_of_a_queue_contains_its_run(sqs: FaultySqs) -> None:
    await a_queue(sqs).open_run(RUN)

    assert list(sqs.bodies) == [f"{URL}conveyor-{RUN}"]


async def test_a_message_contains_only_a_version_and_a_task_reference(sqs: FaultySqs) -> None:
    queue, ref = a_queue(sqs), a_ref()
    await queue.open_run(RUN)
    await queue.send([ref])

    [[body]] = sqs.bodies.values()

    assert json.loads(body) == {
        "v": 1,
        "ref": [ref.job_id, ref.run_id, ref.task_id, ref.shard],
    }


async def test_a_missing_queue_is_looked_up_once_for_a_list_of_any_length(
    sqs: FaultySqs,
) -> None:
    queue = a_queue(sqs)

    with pytest.raises(QueueGone):
        await queue.send([a_ref(index) for index in range(200)])

    assert isinstance(queue.client, RetryingAwsClient)
    assert queue.client.meter is not None
    assert queue.client.meter.calls == {"sqs.GetQueueUrl": 1}


@pytest.mark.parametrize("short", [[1], [10, 3], [4, 4, 4]])
async def test_entries_that_a_batch_refused_are_sent_again(
    sqs: FaultySqs, short: list[int]
) -> None:
    queue = a_queue(sqs)
    await queue.open_run(RUN)
    sqs.short = short

    await queue.send([a_ref(index) for index in range(25)])

    assert await queue.depth(RUN) == Depth(visible=25, hidden=0)


async def test_throttled_entries_are_sent_again_even_if_reported_as_a_sender_fault(
    sqs: FaultySqs,
) -> None:
    queue = a_queue(sqs)
    await queue.open_run(RUN)
    sqs.short, sqs.why = [2], ("RequestThrottled", True)

    await queue.send([a_ref(index) for index in range(10)])

    assert await queue.depth(RUN) == Depth(visible=10, hidden=0)


async def test_a_reference_that_sqs_will_never_accept_is_an_assertion_error(sqs: FaultySqs) -> None:
    queue = a_queue(sqs)
    await queue.open_run(RUN)
    sqs.short, sqs.why = [1], ("InvalidMessageContents", True)

    with pytest.raises(AwsError, match="InvalidMessageContents"):
        await queue.send([a_ref()])


async def test_a_send_that_is_never_accepted_completely_raises_unavailable(sqs: FaultySqs) -> None:
    queue = a_queue(sqs)
    await queue.open_run(RUN)
    sqs.short = [1] * 100

    with pytest.raises(Unavailable):
        await queue.send([a_ref()])


async def test_a_partly_accepted_ack_is_completed(sqs: FaultySqs) -> None:
    queue = a_queue(sqs)
    await queue.open_run(RUN)
    await queue.send([a_ref(index) for index in range(10)])
    messages = await queue.receive(RUN, count_max=10, visibility_s=60)
    sqs.short = [7, 3]

    await queue.ack(messages)

    assert await queue.depth(RUN) == Depth(visible=0, hidden=0)


async def test_a_partly_accepted_extension_is_completed(sqs: FaultySqs, clock: ManualClock) -> None:
    queue = a_queue(sqs)
    await queue.open_run(RUN)
    await queue.send([a_ref(index) for index in range(10)])
    messages = await queue.receive(RUN, count_max=10, visibility_s=60)
    clock.advance(50)
    sqs.short = [7, 3]

    lost = await queue.extend(messages, visibility_s=60)

    clock.advance(59)
    assert lost == frozenset()
    assert await queue.depth(RUN) == Depth(visible=0, hidden=10)


async def test_a_new_queue_that_is_not_visible_yet_is_waited_for(
    sqs: FaultySqs,
) -> None:
    queue = a_queue(sqs)
    await queue.open_run(RUN)
    sqs.unseen = 5

    await queue.send([a_ref()])

    sqs.unseen = 3
    assert len(await queue.receive(RUN, count_max=10, visibility_s=60)) == 1


async def test_a_queue_that_stays_invisible_is_gone(sqs: FaultySqs) -> None:
    queue = a_queue(sqs)
    await queue.open_run(RUN)
    sqs.unseen = 1000

    with pytest.raises(QueueGone):
        await queue.send([a_ref()])


async def test_a_removed_queue_cannot_be_created_again_for_a_minute(
    sqs: FaultySqs, clock: ManualClock
) -> None:
    queue = a_queue(sqs)
    await queue.open_run(RUN)
    await queue.close_run(RUN)

    with pytest.raises(Unavailable):
        await queue.open_run(RUN)

    clock.advance(60)
    await queue.open_run(RUN)


async def test_another_process_looks_up_the_url_of_a_queue_once(sqs: FaultySqs) -> None:
    await a_queue(sqs).open_run(RUN)
    other = a_queue(sqs)

    await other.send([a_ref()])
    await other.receive(RUN, count_max=10, visibility_s=60)

    assert sqs.calls["GetQueueUrl"] == 1


async def test_an_empty_receive_does_not_mean_that_the_queue_is_empty(sqs: FaultySqs) -> None:
    queue = a_queue(sqs)
    await queue.open_run(RUN)
    await queue.send([a_ref()])
    sqs.empty = 1

    assert await queue.receive(RUN, count_max=10, visibility_s=60) == []
    assert len(await queue.receive(RUN, count_max=10, visibility_s=60)) == 1


async def test_a_message_received_twice_can_be_acked_with_both_receipts(
    sqs: FaultySqs,
) -> None:
    queue = a_queue(sqs)
    await queue.open_run(RUN)
    await queue.send([a_ref()])
    sqs.twice = 1

    [first] = await queue.receive(RUN, count_max=10, visibility_s=60)
    [second] = await queue.receive(RUN, count_max=10, visibility_s=60)
    await queue.ack([first, second])

    assert first.ref == second.ref
    assert await queue.depth(RUN) == Depth(visible=0, hidden=0)


async def test_more_than_ten_messages_are_received_by_concurrent_calls(sqs: FaultySqs) -> None:
    queue = a_queue(sqs)
    await queue.open_run(RUN)
    await queue.send([a_ref(index) for index in range(60)])

    messages = await queue.receive(RUN, count_max=45, visibility_s=60)

    assert len({message.ref for message in messages}) == 45
    assert sqs.calls["ReceiveMessage"] == 5


async def test_a_queue_that_was_empty_is_polled_by_one_call(sqs: FaultySqs) -> None:
    queue = a_queue(sqs)
    await queue.open_run(RUN)
    await queue.receive(RUN, count_max=50, visibility_s=60)
    await queue.send([a_ref(index) for index in range(50)])

    counts = []
    for _ in range(2):
        sqs.calls.clear()
        found = await queue.receive(RUN, count_max=40, visibility_s=60)
        counts.append((sqs.calls["ReceiveMessage"], len(found)))

    assert counts == [(1, 10), (4, 40)]


async def test_received_messages_are_kept_although_a_concurrent_receive_failed(
    sqs: FaultySqs,
) -> None:
    queue = a_queue(sqs, LosesAnswers("ReceiveMessage"))
    await queue.open_run(RUN)
    await queue.send([a_ref(index) for index in range(20)])

    messages = await queue.receive(RUN, count_max=20, visibility_s=60)

    assert len(messages) == 10


async def test_a_receive_with_a_lost_answer_raises_unavailable_and_hides_its_messages(
    sqs: FaultySqs, clock: ManualClock
) -> None:
    queue = a_queue(sqs, LosesAnswers("ReceiveMessage"))
    await queue.open_run(RUN)
    await queue.send([a_ref()])

    with pytest.raises(Unavailable):
        await queue.receive(RUN, count_max=10, visibility_s=60)

    assert sqs.calls["ReceiveMessage"] == 1
    clock.advance(60)
    assert len(await queue.receive(RUN, count_max=10, visibility_s=60)) == 1


async def test_sends_and_acks_with_lost_answers_are_repeated(sqs: FaultySqs) -> None:
    queue = a_queue(sqs, LosesAnswers("SendMessageBatch", "DeleteMessageBatch"))
    await queue.open_run(RUN)

    await queue.send([a_ref()])
    messages = await queue.receive(RUN, count_max=10, visibility_s=60)
    await queue.ack(messages)

    assert [message.ref for message in messages] == [a_ref(), a_ref()]
    assert await queue.depth(RUN) == Depth(visible=0, hidden=0)


async def test_an_outdated_receipt_does_not_hide_a_message_held_by_another_process(
    sqs: FaultySqs, clock: ManualClock
) -> None:
    queue, other = a_queue(sqs), a_queue(sqs)
    await queue.open_run(RUN)
    await queue.send([a_ref()])
    [old] = await queue.receive(RUN, count_max=1, visibility_s=60)
    clock.advance(60)
    [new] = await other.receive(RUN, count_max=1, visibility_s=60)

    lost = await queue.extend([old], visibility_s=1000)
    await queue.bounce([old], delay_s=1000)

    assert lost == frozenset({old.receipt})
    clock.advance(60)
    assert await queue.depth(RUN) == Depth(visible=1, hidden=0)
    assert new.receives == 2


async def test_a_receive_that_took_longer_than_its_visibility_time_returns_no_message(
    sqs: FaultySqs, clock: ManualClock
) -> None:
    """The messages were visible again before the answer came, so another worker may have them."""
    queue, other = a_queue(sqs), a_queue(sqs)
    await queue.open_run(RUN)
    await queue.send([a_ref()])
    sqs.after_receive = lambda: clock.advance(60)
    [late] = await queue.receive(RUN, count_max=1, visibility_s=45)
    sqs.after_receive = lambda: None
    [new] = await other.receive(RUN, count_max=1, visibility_s=45)

    lost = await queue.extend([late], visibility_s=1000)
    await queue.bounce([late], delay_s=1000)

    assert lost == frozenset({late.receipt})
    assert new.receives == 2
    clock.advance(46)
    assert await queue.depth(RUN) == Depth(visible=1, hidden=0)


@pytest.mark.parametrize("step_s", [-86_400.0, -3_600.0, 3_600.0, 86_400.0])
async def test_setting_the_clock_loses_no_held_message(
    sqs: FaultySqs, clock: ManualClock, step_s: float
) -> None:
    queue = a_queue(sqs)
    await queue.open_run(RUN)
    await queue.send([a_ref()])
    [held] = await queue.receive(RUN, count_max=1, visibility_s=45)

    clock.step(step_s)

    assert await queue.extend([held], visibility_s=45) == frozenset()


async def put_in(sqs: FaultySqs, queue: SqsQueue, body: str) -> None:
    await queue.open_run(RUN)
    await queue.send([a_ref()])
    foreign = {"QueueUrl": f"{URL}conveyor-{RUN}", "MessageBody": body}
    await sqs.call("sqs", "SendMessage", foreign, deadline_s=1.0)


async def test_a_message_of_another_release_is_left_for_other_workers(
    sqs: FaultySqs, clock: ManualClock
) -> None:
    queue = a_queue(sqs)
    await put_in(sqs, queue, '{"v":2,"ref":{"task":"x"}}')

    received = await queue.receive(RUN, count_max=10, visibility_s=60)

    assert [message.ref for message in received] == [a_ref()]
    assert await queue.depth(RUN) == Depth(visible=0, hidden=2)


async def test_a_message_of_an_unknown_release_goes_to_the_dead_letter_queue(
    sqs: FaultySqs, clock: ManualClock
) -> None:
    queue, body = a_queue(sqs), '{"v":2,"ref":{"task":"x"}}'
    dead_url = (await make_control_queues(queue.client, "conveyor-")).dead_url
    await put_in(sqs, queue, body)

    for _ in range(FOREIGN_RECEIVES_MAX):
        assert sqs.bodies[dead_url] == []
        await queue.receive(RUN, count_max=10, visibility_s=60)
        clock.advance(61)

    assert sqs.bodies[dead_url] == [body]
    assert await queue.depth(RUN) == Depth(visible=1, hidden=0)


@pytest.mark.parametrize("body", ['{"v":1,"ref":[1]}', '{"ref":[]}', "not JSON"])
async def test_an_unreadable_message_goes_to_the_dead_letter_queue(
    sqs: FaultySqs, body: str
) -> None:
    queue = a_queue(sqs)
    dead_url = (await make_control_queues(queue.client, "conveyor-")).dead_url
    await put_in(sqs, queue, body)

    received = await queue.receive(RUN, count_max=10, visibility_s=60)

    assert [message.ref for message in received] == [a_ref()]
    assert await queue.depth(RUN) == Depth(visible=0, hidden=1)
    assert sqs.bodies[dead_url] == [body]


async def test_a_message_that_cannot_be_moved_to_the_dead_letter_queue_does_not_affect_others(
    sqs: FaultySqs,
) -> None:
    queue = a_queue(sqs)
    await put_in(sqs, queue, "not JSON")

    received = await queue.receive(RUN, count_max=10, visibility_s=60)

    assert [message.ref for message in received] == [a_ref()]
    assert await queue.depth(RUN) == Depth(visible=0, hidden=2)


async def test_acks_of_one_run_do_not_wait_for_the_queue_of_another(sqs: FaultySqs) -> None:
    queue = a_queue(sqs)
    for run_id in (RUN, OTHER_RUN):
        await queue.open_run(run_id)
        await queue.send([a_ref(0, run_id)])
    here = await queue.receive(RUN, count_max=1, visibility_s=60)
    there = await queue.receive(OTHER_RUN, count_max=1, visibility_s=60)
    sqs.broken.add(f"{URL}conveyor-{RUN}")

    with pytest.raises(Unavailable):
        await queue.ack([*here, *there])

    assert await queue.depth(OTHER_RUN) == Depth(visible=0, hidden=0)
