"""The store on DynamoDB: one table, tasks in shards, two sparse indexes
(docs/engines.md, DynamoDB store)."""

from __future__ import annotations

from conveyor.engines.aws.dynamodb.store import DynamoStore
from conveyor.engines.aws.dynamodb.table import create_table

__all__ = ["DynamoStore", "create_table"]
