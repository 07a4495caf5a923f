"""The store on DynamoDB: one table, tasks in shards, two sparse indexes
(docs/engines.md, DynamoDB store)."""

from __future__ import annotations

from conveyor.engines.aws.dynamo.schema import create_table
from conveyor.engines.aws.dynamo.store import DynamoStore

__all__ = ["DynamoStore", "create_table"]
