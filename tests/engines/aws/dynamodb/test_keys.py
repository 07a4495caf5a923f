"""The keys of stored items never change, so rows of earlier releases are found."""

from __future__ import annotations

import pytest

from conveyor.domain.changes import ROW_KINDS, AnyKey, Row
from conveyor.engines.aws.dynamodb.items import to_item
from conveyor.engines.aws.dynamodb.keys import item_key
from tests.builders import (
    a_batch,
    a_budget,
    a_crawl,
    a_crawl_step,
    a_crossing,
    a_deletion_intent,
    a_feed,
    a_job,
    a_notice,
    a_record,
    a_run,
    a_sample,
    a_schedule,
    a_share,
    a_stats,
    a_task,
    an_event,
    an_export,
    an_input,
    key_of,
    some_keys,
)

JOB = "Job#00000000000000000000000001"
RUN = "00000000000000000000000101"
CALLER = "Caller#caller-a"

# The keys are written out, because the code derives them from the registry of row kinds.
STORED: list[tuple[Row, str, str]] = [
    (a_job(), JOB, "Job"),
    (a_run(), JOB, f"Run#{RUN}"),
    (a_batch(), JOB, f"Batch#{RUN}#{a_batch().batch_id}"),
    (an_export(), JOB, f"Export#{RUN}#00000000000000000000000901"),
    (a_budget(), JOB, f"Budget#{RUN}"),
    (a_share(), JOB, f"Share#{RUN}#holder-1"),
    (a_sample(29_000_000), JOB, f"Sample#{RUN}#0029000000"),
    (a_crawl(), JOB, f"Crawl#{RUN}"),
    (a_crawl_step(12), JOB, f"CrawlStep#{RUN}#0000000012"),
    (a_schedule(), JOB, "Schedule"),
    (a_stats(3), f"{JOB}#TS3", f"Stats#{RUN}"),
    (a_task(shard=3), f"{JOB}#TS3", f"Task#{RUN}#{a_task().task_id}"),
    (a_record(), "Key#key-1", "Key"),
    (a_notice(), "Notice#NOTICE00000000000000000001", "Notice"),
    (a_deletion_intent(), "Scrub#scrub-1", "Scrub"),
    (a_crossing(), JOB, "Crossing"),
    (an_input(), "Input#00000000000000000000000301", "Input"),
    (an_event(), CALLER, "Event#event-1"),
    (a_feed(), CALLER, "Feed"),
    (some_keys(), CALLER, "SigningKeys"),
]
EXPIRING = {"IdempotencyRecord": 0, "Event": 0, "Export": 604_800, "JobInput": 604_800}


@pytest.mark.parametrize(("row", "partition", "sort"), STORED, ids=lambda row: type(row).__name__)
def test_the_key_of_a_row_is_the_same_in_every_release(row: Row, partition: str, sort: str) -> None:
    key: AnyKey = key_of(row)

    assert item_key(key) == (partition, sort)


def test_every_kind_of_row_has_its_key_listed_here() -> None:
    assert {type(row) for row, _, _ in STORED} == {kind.row_type for kind in ROW_KINDS}


@pytest.mark.parametrize("row", [row for row, _, _ in STORED], ids=lambda row: type(row).__name__)
def test_the_expiry_of_a_row_is_the_same_in_every_release(row: Row) -> None:
    item = to_item(key_of(row), row)

    grace_s = EXPIRING.get(type(row).__name__)
    if grace_s is None:
        assert "ttl" not in item
    else:
        assert item["ttl"] == {"N": str(int(float(item["expires_at"]["N"])) + grace_s)}
