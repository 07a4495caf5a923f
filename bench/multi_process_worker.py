"""One worker process of `bench amplification`: the real worker with a gateway that only waits.

`python -m bench.multi_process_worker THINK_S` runs on the engine that its environment configures
until it gets a signal. It prints the number of messages of each receive call on a run's queue.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import trio

from bench.dispatch import CountingTransport, ThinkingGateway
from conveyor.bootstrap.runtime import open_runtime
from conveyor.cli.shutdown import STOP_S_MAX, cancel_on_signal
from conveyor.config import load_settings
from conveyor.engines.aws.client.client import RetryingAwsClient
from conveyor.engines.aws.sqs import SqsQueue
from conveyor.logs import set_up_logging


def print_count(messages: int) -> None:
    """Writes without a buffer, so that a kill loses at most the call in progress."""
    os.write(sys.stdout.fileno(), b"%d\n" % messages)


async def work(think_s: float) -> None:
    async with (
        open_runtime(load_settings(), role="worker") as world,
        trio.open_nursery() as nursery,
    ):
        queue = world.env.queue
        assert isinstance(queue, SqsQueue)
        assert isinstance(queue.client, RetryingAwsClient)
        queue.client = replace(
            queue.client, transport=CountingTransport(queue.client.transport, print_count)
        )
        nursery.start_soon(cancel_on_signal, nursery.cancel_scope, STOP_S_MAX)
        await replace(world, gateway=ThinkingGateway(think_s)).worker().run()


if __name__ == "__main__":
    set_up_logging("json")
    trio.run(work, float(sys.argv[1]))
