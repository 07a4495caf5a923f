"""A deletion that is interrupted within a batch leaves nothing that the next one cannot find."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from random import Random

import pytest

from conveyor.engines.aws.client.client import Answer, Params
from conveyor.engines.aws.dynamodb import DynamoStore
from conveyor.engines.aws.dynamodb.table import Table
from conveyor.engines.aws.errors import AwsError
from conveyor.engines.memory import memory_engine
from conveyor.ports.errors import Unavailable
from conveyor.simulation.models import AwsModel, FaultSource
from tests.aws import a_table, an_aws_client
from tests.builders import JOB, ManualClock, a_job, a_notice, a_run, keep


class InterruptedBatch:
    """Performs only the write at position `at` of the first batch; all later calls fail."""

    def __init__(self, model: AwsModel, at: int) -> None:
        self._model = model
        self._at = at
        self._is_down = False

    async def call(
        self, service: str, operation: str, params: Params, *, deadline_s: float
    ) -> Answer:
        if self._is_down:
            raise AwsError("InternalFailure", "nothing works", status=500)
        if operation == "BatchWriteItem":
            self._is_down = True
            ((name, requests),) = params["RequestItems"].items()
            params = {"RequestItems": {name: [requests[self._at % len(requests)]]}}
        answer = await self._model.call(service, operation, params, deadline_s=deadline_s)
        if self._is_down:
            raise AwsError("InternalFailure", "nothing works", status=500)
        return answer

    @asynccontextmanager
    async def open(
        self, service: str, operation: str, params: Params, *, deadline_s: float
    ) -> AsyncGenerator[Answer, None]:
        yield await self.call(service, operation, params, deadline_s=deadline_s)


@pytest.mark.parametrize("at", range(4))
async def test_a_row_and_its_index_entries_are_both_deleted_after_an_interruption(
    at: int, autojump_clock: object
) -> None:
    clock = ManualClock()
    model = AwsModel(clock=clock, fault_source=FaultSource(random=Random(1)))
    queue = memory_engine(clock=clock, random=Random(1)).queue
    table = await a_table(an_aws_client(model), "rows")
    store = DynamoStore(table, queue)
    await keep(store, a_job(), a_run(), a_notice())
    cut_off = Table(
        name="rows", client=an_aws_client(InterruptedBatch(model, at)), random=Random(1)
    )

    with pytest.raises(Unavailable):
        await DynamoStore(cut_off, queue).delete_run_rows(JOB, None, limit=100)
    while await store.delete_run_rows(JOB, None, limit=100):
        pass

    partitions = model.dynamodb.tables["rows"].partitions.values()
    assert [sort for partition in partitions for sort in partition.rows] == [("Job",)]
