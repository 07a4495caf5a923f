"""A model of DynamoDB at the level of its API: tables, indexes, expressions, limits and
capacity."""

from __future__ import annotations

from conveyor.simulation.models.dynamodb.service import DynamoModel

__all__ = ["DynamoModel"]
