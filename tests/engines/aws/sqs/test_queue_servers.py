"""SqsQueue with both transports and two servers: behaviour that shows in real time."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import AsyncIterator
from random import Random

import pytest

from conveyor.engines.aws.sqs import SqsQueue
from conveyor.engines.system import SystemClock
from conveyor.ports.queue import Depth
from tests.aws import TRANSPORTS, an_access, an_aws_client
from tests.builders import RUN, a_ref

pytestmark = pytest.mark.slow

NUMBERS = itertools.count()


@pytest.fixture(params=["localstack-lean", "localstack-boto", "moto-lean"])
async def queue(request: pytest.FixtureRequest) -> AsyncIterator[SqsQueue]:
    server, _, plane_name = request.param.partition("-")
    access = an_access(sqs=request.getfixturevalue(server))
    async with TRANSPORTS[plane_name](access) as transport:
        yield SqsQueue(
            client=an_aws_client(transport),
            clock=SystemClock(),
            random=Random(1),
            prefix=f"trip-{next(NUMBERS)}-",
        )


async def test_references_are_sent_received_and_acked(
    queue: SqsQueue, request: pytest.FixtureRequest
) -> None:
    count = (
        10 if "moto" in request.node.name else 25
    )  # moto returns one message to two concurrent calls.
    refs = [a_ref(index) for index in range(count)]
    await queue.open_run(RUN)
    await queue.send(refs)

    messages = await queue.receive(RUN, count_max=count, visibility_s=60)
    await queue.bounce(messages[:1], delay_s=0)
    await queue.ack(messages[1:])
    messages += await queue.receive(RUN, count_max=count, visibility_s=60)
    await queue.ack(messages[-1:])

    assert Counter(message.ref for message in messages) == Counter([*refs, messages[0].ref])
    assert messages[-1].receives == 2
    assert await queue.depth(RUN) == Depth(visible=0, hidden=0)


async def test_a_received_message_becomes_visible_again_by_itself(queue: SqsQueue) -> None:
    await queue.open_run(RUN)
    await queue.send([a_ref()])
    await queue.receive(RUN, count_max=1, visibility_s=1)

    url = await queue.client.call("sqs", "GetQueueUrl", {"QueueName": queue.prefix + RUN})
    waiting = {"QueueUrl": url["QueueUrl"], "WaitTimeSeconds": 10}
    answer = await queue.client.call("sqs", "ReceiveMessage", waiting)

    assert len(answer["Messages"]) == 1


async def test_an_unknown_receipt_is_returned_as_lost(queue: SqsQueue) -> None:
    await queue.open_run(RUN)
    await queue.send([a_ref()])
    [message] = await queue.receive(RUN, count_max=1, visibility_s=60)
    url = await queue.client.call("sqs", "GetQueueUrl", {"QueueName": queue.prefix + RUN})
    gone = {"QueueUrl": url["QueueUrl"], "ReceiptHandle": message.receipt}
    await queue.client.call("sqs", "DeleteMessage", gone)

    lost = await queue.extend([message], visibility_s=60)

    assert lost == frozenset({message.receipt})
