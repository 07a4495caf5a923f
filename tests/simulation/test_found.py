"""What simulation found in the AWS engine, told over the models of its services."""

from __future__ import annotations

from random import Random

from conveyor.engines.aws.dynamo import DynamoStore
from conveyor.engines.aws.metering import Meter
from conveyor.engines.aws.seam import LayeredSeam
from conveyor.engines.memory import MemoryQueue
from conveyor.simulation.models.aws import AwsModel
from conveyor.simulation.models.fate import Fate
from conveyor.simulation.models.pessimism import DynamoFaults, Pessimism
from tests.aws import a_table
from tests.builders import JOB, RUN, ManualClock, a_job, an_event, keep


async def test_a_scrub_rests_while_an_index_still_shows_what_is_gone() -> None:
    clock = ManualClock()
    model = AwsModel(clock=clock, fate=Fate(random=Random(1)))
    table = await a_table(LayeredSeam(plane=model, random=Random(2), meter=Meter()), "rows")
    store = DynamoStore(table, MemoryQueue(clock, Random(3)))
    await keep(store, a_job(), an_event(job_id=JOB, run_id=RUN))
    model.fate.pessimism = Pessimism(
        dynamodb=DynamoFaults(late_index_rate=1.0, late_index_s=(60.0, 60.0))
    )

    assert await store.scrub(JOB, None, limit=100) == 1
    assert await store.scrub(JOB, None, limit=100) == 0
