"""Models of DynamoDB, SQS, S3 and Redis. They have no faults until their `FaultRates` say
otherwise."""

from __future__ import annotations

from conveyor.simulation.models.aws import AwsModel
from conveyor.simulation.models.fault_rates import CALM, FAULTS, FaultRates
from conveyor.simulation.models.fault_source import FaultSource
from conveyor.simulation.models.redis import RedisModel

__all__ = ["CALM", "FAULTS", "AwsModel", "FaultRates", "FaultSource", "RedisModel"]
