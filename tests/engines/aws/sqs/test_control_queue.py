"""The control queue and its dead-letter queue on a real server."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from random import Random

import pytest
from trio.testing import MockClock

from conveyor.engines.aws.client.client import AwsClient
from conveyor.engines.aws.control_queue import ControlMessage, ControlQueue
from conveyor.engines.aws.errors import AwsError
from conveyor.engines.aws.sqs import (
    RECEIVES_MAX,
    ControlQueues,
    find_control_queues,
    make_control_queues,
)
from conveyor.ports.errors import QueueGone
from tests.aws import an_access, an_aws_client, an_http_transport
from tests.builders import JOB, OTHER_RUN, RUN
from tests.engines.aws.scripted import ScriptedTransport

pytestmark = pytest.mark.slow

NUMBERS = itertools.count()


@pytest.fixture
async def client(localstack: str) -> AsyncIterator[AwsClient]:
    async with an_http_transport(an_access(sqs=localstack)) as transport:
        yield an_aws_client(transport)


@pytest.fixture
def prefix() -> str:
    return f"bell-{next(NUMBERS)}-"


@pytest.fixture
async def urls(client: AwsClient, prefix: str) -> ControlQueues:
    return await make_control_queues(client, prefix)


@pytest.fixture
def control_queue(client: AwsClient, urls: ControlQueues) -> ControlQueue:
    return ControlQueue(client=client, random=Random(1), control_url=urls.control_url)


def runs_of(messages: list[ControlMessage]) -> set[tuple[str, str]]:
    return {(ring.job_id, ring.run_id) for ring in messages}


async def test_creating_the_control_queues_again_changes_nothing(
    client: AwsClient, prefix: str, urls: ControlQueues
) -> None:
    assert await make_control_queues(client, prefix) == urls
    assert await find_control_queues(client, prefix) == urls


async def test_missing_control_queues_are_reported(client: AwsClient, prefix: str) -> None:
    with pytest.raises(QueueGone):
        await find_control_queues(client, prefix)


async def test_control_queues_of_another_release_get_the_current_attributes(
    client: AwsClient, prefix: str
) -> None:
    params = {"QueueName": f"{prefix}control", "Attributes": {"MessageRetentionPeriod": "60"}}
    older = await client.call("sqs", "CreateQueue", params)

    urls = await make_control_queues(client, prefix)

    assert urls.control_url == older["QueueUrl"]
    params = {"QueueUrl": urls.control_url, "AttributeNames": ["RedrivePolicy"]}
    said = await client.call("sqs", "GetQueueAttributes", params)
    assert "control-dead" in said["Attributes"]["RedrivePolicy"]


async def test_new_control_queues_that_are_not_visible_yet_are_waited_for(
    autojump_clock: MockClock,
) -> None:
    url, gone = {"QueueUrl": "http://queue"}, AwsError("QueueDoesNotExist", "")
    transport = ScriptedTransport(
        url, gone, gone, {"Attributes": {"QueueArn": "arn"}}, url, gone, {}
    )

    urls = await make_control_queues(an_aws_client(transport), "new-")

    assert urls == ControlQueues("http://queue", "http://queue")


async def test_a_control_message_is_received_until_it_is_deleted(
    control_queue: ControlQueue,
) -> None:
    await control_queue.batch_opened(JOB, RUN)
    await control_queue.batch_opened(JOB, OTHER_RUN)

    received: list[ControlMessage] = []
    while len(received) < 2:
        received += await control_queue.receive(wait_s=1)
    await control_queue.delete(received)

    assert runs_of(received) == {(JOB, RUN), (JOB, OTHER_RUN)}
    assert await control_queue.receive(wait_s=0) == []


async def test_sending_to_a_deleted_control_queue_raises_no_error(
    client: AwsClient, control_queue: ControlQueue, urls: ControlQueues
) -> None:
    await client.call("sqs", "DeleteQueue", {"QueueUrl": urls.control_url})

    await control_queue.batch_opened(JOB, RUN)

    with pytest.raises(QueueGone):
        await control_queue.receive(wait_s=0)


@pytest.mark.parametrize(
    "body", ['{"v":2}', '{"v":1,"kind":"other","job_id":"j","run_id":"r"}', "?"]
)
async def test_an_unknown_control_message_goes_to_the_dead_letter_queue(
    client: AwsClient, control_queue: ControlQueue, urls: ControlQueues, body: str
) -> None:
    await client.call("sqs", "SendMessage", {"QueueUrl": urls.control_url, "MessageBody": body})
    hurried = {"QueueUrl": urls.control_url, "Attributes": {"VisibilityTimeout": "0"}}
    await client.call("sqs", "SetQueueAttributes", hurried)

    received = [await control_queue.receive(wait_s=0) for _ in range(RECEIVES_MAX + 1)]
    params = {"QueueUrl": urls.dead_url, "WaitTimeSeconds": 2}
    dead = await client.call("sqs", "ReceiveMessage", params)

    assert received == [[]] * (RECEIVES_MAX + 1)
    assert [message["Body"] for message in dead["Messages"]] == [body]


async def test_a_message_that_was_received_too_often_goes_to_the_dead_letter_queue(
    client: AwsClient, urls: ControlQueues
) -> None:
    params = {"QueueUrl": urls.control_url, "AttributeNames": ["RedrivePolicy"]}

    policy = (await client.call("sqs", "GetQueueAttributes", params))["Attributes"]["RedrivePolicy"]

    assert json.loads(policy)["maxReceiveCount"] == RECEIVES_MAX
