"""Names and attributes of queues, and their creation, which may be repeated
(docs/engines.md, Queues on SQS).

A run's queue has no redrive policy: the row of the task decides about a reference that is delivered
again and again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress

import msgspec
import trio

from conveyor.engines.aws.client.client import Answer, AwsClient, Params
from conveyor.engines.aws.errors import AwsError
from conveyor.ports.errors import QueueGone, Unavailable

# SQS allows 80 characters in a name, and a run's id has 26.
PREFIX = re.compile(r"[A-Za-z0-9_-]{1,50}\Z")
CONTROL, DEAD = "control", "control-dead"
# After so many receives SQS moves a control message to the dead-letter queue.
RECEIVES_MAX = 5
# A new queue may seem missing for some seconds.
NEW_LOOKS_MAX = 10
NEW_LOOK_S = 1.0

_RETENTION_S = 14 * 24 * 3600  # The limit of SQS: a waiting message should not disappear.
_VISIBILITY_S = 60
RUN_ATTRIBUTES = {
    "MessageRetentionPeriod": str(_RETENTION_S),
    "VisibilityTimeout": str(_VISIBILITY_S),
}


class ControlQueues(msgspec.Struct, frozen=True):
    """The URLs of the control queue and of its dead-letter queue."""

    control_url: str
    dead_url: str


async def make(client: AwsClient, name: str, attributes: Mapping[str, str]) -> str:
    """Creates the queue if it is missing, and returns its URL.

    Raises Unavailable for a queue that was just removed: SQS refuses to create it for a minute.
    """
    params = {"QueueName": name, "Attributes": attributes}
    try:
        answer = await client.call("sqs", "CreateQueue", params)
    except QueueGone as error:
        raise Unavailable("sqs.CreateQueue: the queue was removed a moment ago") from error
    except AwsError as error:
        # The queue exists with other attributes: another release created it.
        if error.code not in {"QueueNameExists", "QueueAlreadyExists"}:
            raise
        return await url_of(client, name)
    url: str = answer["QueueUrl"]
    return url


async def url_of(client: AwsClient, name: str) -> str:
    """Returns the URL of a queue. Raises QueueGone if there is none of this name."""
    answer = await client.call("sqs", "GetQueueUrl", {"QueueName": name})
    url: str = answer["QueueUrl"]
    return url


async def make_control_queues(client: AwsClient, prefix: str) -> ControlQueues:
    dead_url = await make(client, prefix + DEAD, RUN_ATTRIBUTES)
    params = {"QueueUrl": dead_url, "AttributeNames": ["QueueArn"]}
    arn = (await _patiently(client, "GetQueueAttributes", params))["Attributes"]["QueueArn"]
    redrive = {"deadLetterTargetArn": arn, "maxReceiveCount": RECEIVES_MAX}
    attributes = {**RUN_ATTRIBUTES, "RedrivePolicy": json.dumps(redrive)}
    control_url = await make(client, prefix + CONTROL, attributes)
    # An existing queue may have other attributes, if another release or a person created it.
    wanted = {"QueueUrl": control_url, "Attributes": attributes}
    await _patiently(client, "SetQueueAttributes", wanted)
    return ControlQueues(control_url, dead_url)


async def _patiently(client: AwsClient, operation: str, params: Params) -> Answer:
    """Repeats a call while the queue seems missing, because it may be new."""
    for _ in range(NEW_LOOKS_MAX):
        with suppress(QueueGone):
            return await client.call("sqs", operation, params)
        await trio.sleep(NEW_LOOK_S)
    return await client.call("sqs", operation, params)


async def find_control_queues(client: AwsClient, prefix: str) -> ControlQueues:
    """Finds both queues. Raises QueueGone if they were not created yet."""
    control_url = await url_of(client, prefix + CONTROL)
    return ControlQueues(control_url, await url_of(client, prefix + DEAD))
