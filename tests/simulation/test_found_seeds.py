"""Regression tests of defects that simulation found in the AWS engine."""

from __future__ import annotations

from random import Random

from conveyor.engines.aws.client.client import RetryingAwsClient
from conveyor.engines.aws.client.usage import Meter
from conveyor.engines.aws.dynamodb import DynamoStore
from conveyor.engines.memory import MemoryQueue
from conveyor.simulation.models.aws import AwsModel
from conveyor.simulation.models.fault_rates import DynamoFaults, FaultRates
from conveyor.simulation.models.fault_source import FaultSource
from tests.aws import a_table
from tests.builders import JOB, RUN, ManualClock, a_job, an_event, keep


async def test_a_deletion_does_not_count_rows_that_only_a_late_index_shows() -> None:
    clock = ManualClock()
    model = AwsModel(clock=clock, fault_source=FaultSource(random=Random(1)))
    table = await a_table(
        RetryingAwsClient(transport=model, random=Random(2), meter=Meter()), "rows"
    )
    store = DynamoStore(table, MemoryQueue(clock, Random(3)))
    await keep(store, a_job(), an_event(job_id=JOB, run_id=RUN))
    model.fault_source.service_rates = FaultRates(
        dynamodb=DynamoFaults(late_index_rate=1.0, late_index_s=(60.0, 60.0))
    )

    assert await store.delete_run_rows(JOB, None, limit=100) == 1
    assert await store.delete_run_rows(JOB, None, limit=100) == 0
