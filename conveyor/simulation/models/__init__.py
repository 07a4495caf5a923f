"""Models of DynamoDB, SQS, S3 and Redis, at their best until a Pessimism says otherwise."""

from __future__ import annotations

from conveyor.simulation.models.aws import AwsModel
from conveyor.simulation.models.fate import Fate
from conveyor.simulation.models.pessimism import CALM, FAULTS, Pessimism
from conveyor.simulation.models.redis import RedisModel

__all__ = ["CALM", "FAULTS", "AwsModel", "Fate", "Pessimism", "RedisModel"]
