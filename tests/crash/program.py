"""Runs the product with a crash switch: `TEST_CRASH_AT=... python -m tests.crash.program dev`.

Only the ports are wrapped; everything else is the product.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from conveyor.bootstrap import runtime
from conveyor.bootstrap.runtime import Runtime
from conveyor.cli.main import main
from conveyor.engines.aws import engine
from conveyor.engines.aws.client.client import RetryingAwsClient
from conveyor.usecases.context import Context
from tests.crash.injection import VARIABLE, CrashingTransport, Switch, crashing, parse_crash_point

Parse = Callable[[str], Switch]


def run(parse: Parse = parse_crash_point) -> None:
    """Runs the program. It patches the composition root, where the ports are created."""
    crash_at = os.environ.pop(VARIABLE, "")
    if crash_at:
        _wrap(parse(crash_at))
    main()


def _wrap(switch: Switch) -> None:
    make_env, make_client = runtime.make_env, RetryingAwsClient
    open_aws_world = runtime._open_aws_world

    def make_crashing_env(*arguments: Any) -> Context:
        env = make_env(*arguments)
        return replace(
            env,
            store=crashing(env.store, "store", switch),
            queue=crashing(env.queue, "queue", switch),
            blobs=crashing(env.blobs, "blobs", switch),
            coordinator=crashing(env.coordinator, "coordinator", switch),
        )

    def make_crashing_client(*, transport: Any, **options: Any) -> Any:
        return make_client(transport=CrashingTransport(transport, switch), **options)

    @asynccontextmanager
    async def open_crashing_world(*arguments: Any) -> AsyncGenerator[Runtime, None]:
        async with open_aws_world(*arguments) as world:
            cache = world.env.cache
            if cache is not None:
                cache = crashing(cache, "cache", switch)
            yield replace(world, env=replace(world.env, cache=cache))

    vars(runtime)["make_env"] = make_crashing_env
    vars(runtime)["_open_aws_world"] = open_crashing_world
    vars(engine)["RetryingAwsClient"] = make_crashing_client


if __name__ == "__main__":
    run()
