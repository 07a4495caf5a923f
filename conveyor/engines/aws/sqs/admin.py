"""Queues as such: their names, their attributes, and making them so that twice is once
(docs/engines.md, Queues on SQS).

A run's queue has no redrive: a ref that comes back again and again is judged by its task's row.
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

# A run's id has 26 characters, a name at most 80.
PREFIX = re.compile(r"[A-Za-z0-9_-]{1,50}\Z")
CONTROL, DEAD = "control", "control-dead"
RECEIVES_MAX = 5
NEW_LOOKS_MAX = 10
NEW_LOOK_S = 1.0

_RETENTION_S = 14 * 24 * 3600
_VISIBILITY_S = 60
RUN_ATTRIBUTES = {
    "MessageRetentionPeriod": str(_RETENTION_S),
    "VisibilityTimeout": str(_VISIBILITY_S),
}


class ControlQueues(msgspec.Struct, frozen=True):
    """Where doorbells ring, and where those end up that nobody could make sense of."""

    control_url: str
    dead_url: str


async def make(client: AwsClient, name: str, attributes: Mapping[str, str]) -> str:
    """The URL of the queue, which is there from now on. SQS refuses for a minute to make one that
    was just removed: Unavailable."""
    params = {"QueueName": name, "Attributes": attributes}
    try:
        answer = await client.call("sqs", "CreateQueue", params)
    except QueueGone as error:
        raise Unavailable("sqs.CreateQueue: the queue was removed a moment ago") from error
    except AwsError as error:
        # Another release made it, with attributes that were right then.
        if error.code not in {"QueueNameExists", "QueueAlreadyExists"}:
            raise
        return await url_of(client, name)
    url: str = answer["QueueUrl"]
    return url


async def url_of(client: AwsClient, name: str) -> str:
    """QueueGone when there is none of this name."""
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
    # One that was there may have been made by another release, or by hand.
    wanted = {"QueueUrl": control_url, "Attributes": attributes}
    await _patiently(client, "SetQueueAttributes", wanted)
    return ControlQueues(control_url, dead_url)


async def _patiently(client: AwsClient, operation: str, params: Params) -> Answer:
    """A queue that was made a moment ago may seem to be missing."""
    for _ in range(NEW_LOOKS_MAX):
        with suppress(QueueGone):
            return await client.call("sqs", operation, params)
        await trio.sleep(NEW_LOOK_S)
    return await client.call("sqs", operation, params)


async def find_control_queues(client: AwsClient, prefix: str) -> ControlQueues:
    """QueueGone before they were made."""
    control_url = await url_of(client, prefix + CONTROL)
    return ControlQueues(control_url, await url_of(client, prefix + DEAD))
