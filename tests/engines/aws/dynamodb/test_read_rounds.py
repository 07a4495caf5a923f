"""Batches that a slow service accepts only in part: no further round begins after the deadline of
the batch, long before messages or claims return to other workers."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from conveyor.engines.aws.dynamodb import table as tables
from conveyor.engines.aws.dynamodb.table import Table
from conveyor.engines.aws.sqs import ROUNDS_S_MAX, all_entries
from conveyor.ports.errors import Unavailable
from tests.aws import an_aws_client
from tests.engines.aws.scripted import ScriptedAnswer, ScriptedTransport

SLOW_S = 8.0
ROWS = "rows"


class SlowTransport(ScriptedTransport):
    async def call(
        self, service: str, operation: str, params: Mapping[str, Any], *, deadline_s: float
    ) -> dict[str, Any]:
        await trio.sleep(SLOW_S)
        return await super().call(service, operation, params, deadline_s=deadline_s)


async def test_a_batch_that_is_never_accepted_completely_ends_at_its_deadline(
    autojump_clock: MockClock,
) -> None:
    rounds = 0

    async def take_nothing(operation: str, params: Mapping[str, Any]) -> dict[str, Any]:
        nonlocal rounds
        rounds += 1
        await trio.sleep(SLOW_S)
        return {}

    with pytest.raises(Unavailable, match="2 entries"):
        await all_entries(take_nothing, "SendMessageBatch", [{}, {}], Random(1))

    assert rounds == 3
    assert trio.current_time() < ROUNDS_S_MAX + SLOW_S


async def test_deletions_that_are_never_accepted_completely_end_at_their_deadline(
    autojump_clock: MockClock,
) -> None:
    left: ScriptedAnswer = {"UnprocessedItems": {ROWS: [{"DeleteRequest": {}}]}}
    transport = SlowTransport(left)
    table = Table(name=ROWS, client=an_aws_client(transport), random=Random(1))

    with pytest.raises(Unavailable):
        await table.remove([("partition", "sort")])

    assert len(transport.asked) == 3
    assert trio.current_time() < tables.ROUNDS_S_MAX + SLOW_S
