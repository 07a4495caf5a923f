"""What SQS alone may do to a queue: batches taken in part, queues not seen yet, lost answers."""

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
from tests.engines.aws.sqs.faulty_sqs import URL, SpoiltSqs


@pytest.fixture
def clock(autojump_clock: object) -> ManualClock:
    return ManualClock()


@pytest.fixture
def sqs(clock: ManualClock) -> SpoiltSqs:
    return SpoiltSqs(ServerClock(clock))


def a_queue(sqs: SpoiltSqs, faults: Faults | None = None) -> SqsQueue:
    client = an_aws_client(sqs, faults=faults)
    return SqsQueue(client=client, clock=sqs.clock, random=Random(1), prefix="conveyor-")


class LosesAnswers:
    """The first answer to each of these operations, after all was done."""

    def __init__(self, *operations: str) -> None:
        self._left = set(operations)

    async def before(self, service: str, operation: str, params: Params) -> None:
        pass

    async def after(self, service: str, operation: str, params: Params) -> None:
        if operation in self._left:
            self._left.remove(operation)
            raise NoResponse("the connection closed", was_sent=True)


async def test_a_queue_is_named_by_its_run(sqs: SpoiltSqs) -> None:
    await a_queue(sqs).open_run(RUN)

    assert list(sqs.bodies) == [f"{URL}conveyor-{RUN}"]


async def test_a_message_holds_a_version_and_a_ref_and_nothing_else(sqs: SpoiltSqs) -> None:
    queue, ref = a_queue(sqs), a_ref()
    await queue.open_run(RUN)
    await queue.send([ref])

    [[body]] = sqs.bodies.values()

    assert json.loads(body) == {
        "v": 1,
        "ref": [ref.job_id, ref.run_id, ref.task_id, ref.shard],
    }


async def test_a_queue_that_is_not_there_is_asked_for_once_however_long_the_list(
    sqs: SpoiltSqs,
) -> None:
    queue = a_queue(sqs)

    with pytest.raises(QueueGone):
        await queue.send([a_ref(index) for index in range(200)])

    assert isinstance(queue.client, RetryingAwsClient)
    assert queue.client.meter is not None
    assert queue.client.meter.calls == {"sqs.GetQueueUrl": 1}


@pytest.mark.parametrize("short", [[1], [10, 3], [4, 4, 4]])
async def test_what_a_batch_did_not_take_is_sent_again(sqs: SpoiltSqs, short: list[int]) -> None:
    queue = a_queue(sqs)
    await queue.open_run(RUN)
    sqs.short = short

    await queue.send([a_ref(index) for index in range(25)])

    assert await queue.depth(RUN) == Depth(visible=25, hidden=0)


async def test_entries_that_are_throttled_are_sent_again_whoever_is_at_fault(
    sqs: SpoiltSqs,
) -> None:
    queue = a_queue(sqs)
    await queue.open_run(RUN)
    sqs.short, sqs.why = [2], ("RequestThrottled", True)

    await queue.send([a_ref(index) for index in range(10)])

    assert await queue.depth(RUN) == Depth(visible=10, hidden=0)


async def test_a_ref_that_will_never_be_taken_is_our_bug(sqs: SpoiltSqs) -> None:
    queue = a_queue(sqs)
    await queue.open_run(RUN)
    sqs.short, sqs.why = [1], ("InvalidMessageContents", True)

    with pytest.raises(AwsError, match="InvalidMessageContents"):
        await queue.send([a_ref()])


async def test_a_send_that_is_never_taken_whole_is_an_outage(sqs: SpoiltSqs) -> None:
    queue = a_queue(sqs)
    await queue.open_run(RUN)
    sqs.short = [1] * 100

    with pytest.raises(Unavailable):
        await queue.send([a_ref()])


async def test_an_ack_that_was_taken_in_part_is_finished(sqs: SpoiltSqs) -> None:
    queue = a_queue(sqs)
    await queue.open_run(RUN)
    await queue.send([a_ref(index) for index in range(10)])
    messages = await queue.receive(RUN, count_max=10, visibility_s=60)
    sqs.short = [7, 3]

    await queue.ack(messages)

    assert await queue.depth(RUN) == Depth(visible=0, hidden=0)


async def test_a_beat_that_was_taken_in_part_is_finished(
    sqs: SpoiltSqs, clock: ManualClock
) -> None:
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


async def test_a_queue_that_is_not_seen_right_after_its_making_is_waited_for(
    sqs: SpoiltSqs,
) -> None:
    queue = a_queue(sqs)
    await queue.open_run(RUN)
    sqs.unseen = 5

    await queue.send([a_ref()])

    sqs.unseen = 3
    assert len(await queue.receive(RUN, count_max=10, visibility_s=60)) == 1


async def test_a_queue_that_stays_unseen_is_gone(sqs: SpoiltSqs) -> None:
    queue = a_queue(sqs)
    await queue.open_run(RUN)
    sqs.unseen = 1000

    with pytest.raises(QueueGone):
        await queue.send([a_ref()])


async def test_a_queue_that_was_just_removed_cannot_be_made_for_a_minute(
    sqs: SpoiltSqs, clock: ManualClock
) -> None:
    queue = a_queue(sqs)
    await queue.open_run(RUN)
    await queue.close_run(RUN)

    with pytest.raises(Unavailable):
        await queue.open_run(RUN)

    clock.advance(60)
    await queue.open_run(RUN)


async def test_another_process_finds_the_queue_by_its_name_once(sqs: SpoiltSqs) -> None:
    await a_queue(sqs).open_run(RUN)
    other = a_queue(sqs)

    await other.send([a_ref()])
    await other.receive(RUN, count_max=10, visibility_s=60)

    assert sqs.calls["GetQueueUrl"] == 1


async def test_an_empty_answer_may_be_false_and_proves_nothing(sqs: SpoiltSqs) -> None:
    queue = a_queue(sqs)
    await queue.open_run(RUN)
    await queue.send([a_ref()])
    sqs.empty = 1

    assert await queue.receive(RUN, count_max=10, visibility_s=60) == []
    assert len(await queue.receive(RUN, count_max=10, visibility_s=60)) == 1


async def test_a_message_may_be_in_two_hands_and_acks_of_both_are_fine(
    sqs: SpoiltSqs,
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


async def test_more_than_ten_are_received_by_calls_at_once(sqs: SpoiltSqs) -> None:
    queue = a_queue(sqs)
    await queue.open_run(RUN)
    await queue.send([a_ref(index) for index in range(60)])

    messages = await queue.receive(RUN, count_max=45, visibility_s=60)

    assert len({message.ref for message in messages}) == 45
    assert sqs.calls["ReceiveMessage"] == 5


async def test_a_queue_that_was_empty_is_looked_at_by_one_call(sqs: SpoiltSqs) -> None:
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


async def test_messages_in_hand_are_not_dropped_because_another_receive_failed(
    sqs: SpoiltSqs,
) -> None:
    queue = a_queue(sqs, LosesAnswers("ReceiveMessage"))
    await queue.open_run(RUN)
    await queue.send([a_ref(index) for index in range(20)])

    messages = await queue.receive(RUN, count_max=20, visibility_s=60)

    assert len(messages) == 10


async def test_a_receive_whose_answer_is_lost_is_an_outage_and_hides_its_messages(
    sqs: SpoiltSqs, clock: ManualClock
) -> None:
    queue = a_queue(sqs, LosesAnswers("ReceiveMessage"))
    await queue.open_run(RUN)
    await queue.send([a_ref()])

    with pytest.raises(Unavailable):
        await queue.receive(RUN, count_max=10, visibility_s=60)

    assert sqs.calls["ReceiveMessage"] == 1
    clock.advance(60)
    assert len(await queue.receive(RUN, count_max=10, visibility_s=60)) == 1


async def test_sends_and_acks_whose_answers_are_lost_are_made_again(sqs: SpoiltSqs) -> None:
    queue = a_queue(sqs, LosesAnswers("SendMessageBatch", "DeleteMessageBatch"))
    await queue.open_run(RUN)

    await queue.send([a_ref()])
    messages = await queue.receive(RUN, count_max=10, visibility_s=60)
    await queue.ack(messages)

    assert [message.ref for message in messages] == [a_ref(), a_ref()]
    assert await queue.depth(RUN) == Depth(visible=0, hidden=0)


async def test_a_lapsed_receipt_hides_no_message_that_somebody_else_has(
    sqs: SpoiltSqs, clock: ManualClock
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


async def test_a_receive_that_took_longer_than_its_visibility_gives_nothing_to_hold(
    sqs: SpoiltSqs, clock: ManualClock
) -> None:
    """Its messages were visible again before the answer came: another worker may have them."""
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
async def test_a_clock_that_is_set_costs_no_message_that_is_held(
    sqs: SpoiltSqs, clock: ManualClock, step_s: float
) -> None:
    queue = a_queue(sqs)
    await queue.open_run(RUN)
    await queue.send([a_ref()])
    [held] = await queue.receive(RUN, count_max=1, visibility_s=45)

    clock.step(step_s)

    assert await queue.extend([held], visibility_s=45) == frozenset()


async def put_in(sqs: SpoiltSqs, queue: SqsQueue, body: str) -> None:
    await queue.open_run(RUN)
    await queue.send([a_ref()])
    foreign = {"QueueUrl": f"{URL}conveyor-{RUN}", "MessageBody": body}
    await sqs.call("sqs", "SendMessage", foreign, deadline_s=1.0)


async def test_a_message_of_another_release_is_left_for_others(
    sqs: SpoiltSqs, clock: ManualClock
) -> None:
    queue = a_queue(sqs)
    await put_in(sqs, queue, '{"v":2,"ref":{"task":"x"}}')

    received = await queue.receive(RUN, count_max=10, visibility_s=60)

    assert [message.ref for message in received] == [a_ref()]
    assert await queue.depth(RUN) == Depth(visible=0, hidden=2)


async def test_a_message_that_no_release_comes_for_goes_to_the_dead_queue(
    sqs: SpoiltSqs, clock: ManualClock
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
async def test_a_message_that_nobody_can_read_goes_to_the_dead_queue(
    sqs: SpoiltSqs, body: str
) -> None:
    queue = a_queue(sqs)
    dead_url = (await make_control_queues(queue.client, "conveyor-")).dead_url
    await put_in(sqs, queue, body)

    received = await queue.receive(RUN, count_max=10, visibility_s=60)

    assert [message.ref for message in received] == [a_ref()]
    assert await queue.depth(RUN) == Depth(visible=0, hidden=1)
    assert sqs.bodies[dead_url] == [body]


async def test_a_message_that_cannot_be_put_away_now_costs_its_neighbours_nothing(
    sqs: SpoiltSqs,
) -> None:
    queue = a_queue(sqs)
    await put_in(sqs, queue, "not JSON")

    received = await queue.receive(RUN, count_max=10, visibility_s=60)

    assert [message.ref for message in received] == [a_ref()]
    assert await queue.depth(RUN) == Depth(visible=0, hidden=2)


async def test_acks_of_one_run_do_not_wait_for_the_queue_of_another(sqs: SpoiltSqs) -> None:
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
