"""Fault rates: how often, and how badly, the modelled services fail (docs/simulator.md, Models).

A rate is a probability per occasion. All rates are 0 by default: the models then behave as well as
the real services ever do.
"""

from __future__ import annotations

import msgspec

Span = tuple[float, float]
"""A range of seconds: minimum and maximum."""

_DAY_S = 24 * 3600.0


class CallFaults(msgspec.Struct, frozen=True, kw_only=True):
    """Faults of every call to every service. `latency_s` is the normal latency and no fault."""

    latency_s: Span = (0.0, 0.0)
    refused_rate: float = 0.0
    lost_rate: float = 0.0
    slow_rate: float = 0.0
    slow_s: Span = (0.001, 30.0)
    stalled_rate: float = 0.0
    stalled_s: Span = (20.0, 120.0)
    late_rate: float = 0.0
    late_s: Span = (0.0, 60.0)


class CapacityLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Units per second: of one partition key, and of a table that is still cold."""

    partition_writes: float = 1000.0
    partition_reads: float = 3000.0
    table_writes: float = 4000.0
    table_reads: float = 12000.0


class DynamoFaults(msgspec.Struct, frozen=True, kw_only=True):
    """`capacity` None means unlimited. A transaction holds its items against others for up to
    `conflict_s`.

    `in_progress_rate`: a repeated transaction is answered TransactionInProgressException.
    `never_expires_rate`: an expired item is never removed. `short_page_rate`: a page ends early,
    perhaps empty.
    """

    capacity: CapacityLimits | None = None
    throttled_shard_rate: float = 0.0
    throttled_shard_s: Span = (1.0, 60.0)
    unprocessed_rate: float = 0.0
    conflict_rate: float = 0.0
    conflict_s: float = 0.0
    in_progress_rate: float = 0.0
    stale_read_rate: float = 0.0
    stale_read_s: float = 5.0
    late_index_rate: float = 0.0
    late_index_s: Span = (0.0, 60.0)
    late_expiry_rate: float = 0.0
    late_expiry_s: Span = (0.0, 2 * _DAY_S)
    never_expires_rate: float = 0.0
    short_page_rate: float = 0.0


class SqsFaults(msgspec.Struct, frozen=True, kw_only=True):
    """`undead_rate`: a deleted message is delivered again. `ghost_rate`: a removed queue goes on
    accepting messages, which are lost. `unseen_rate`: a new queue cannot be used yet.
    `visibility_drift` is the fraction by which a message may reappear too early or too late.
    `garbage_rate`: a foreign message is sent to the queue together with one of ours."""

    duplicate_rate: float = 0.0
    undead_rate: float = 0.0
    undead_s: Span = (0.0, 60.0)
    reordered_rate: float = 0.0
    false_empty_rate: float = 0.0
    lost_receive_rate: float = 0.0
    stale_receipt_rate: float = 0.0
    visibility_drift: float = 0.0
    unseen_rate: float = 0.0
    unseen_s: Span = (0.0, 2.0)
    ghost_rate: float = 0.0
    ghost_s: Span = (0.0, 60.0)
    in_flight_max: int = 120_000
    retention_s_max: float = 14 * _DAY_S
    partial_batch_rate: float = 0.0
    garbage_rate: float = 0.0


class S3Faults(msgspec.Struct, frozen=True, kw_only=True):
    """`left_open_rate`: an upload in parts is not removed when it is aborted. `page_keys_max` is
    the number of keys in a truncated list."""

    slow_down_rate: float = 0.0
    slow_rate: float = 0.0
    slow_s: Span = (1.0, 50.0)
    lost_put_rate: float = 0.0
    truncated_list_rate: float = 0.0
    page_keys_max: int = 1
    undeleted_rate: float = 0.0
    left_open_rate: float = 0.0
    broken_read_rate: float = 0.0


class RedisFaults(msgspec.Struct, frozen=True, kw_only=True):
    """`down_rate`, `failover_rate` and `split_rate` apply to each call; the fault then lasts for a
    while. `split_rate`: two primaries exist, and each connection reaches one of them. `deaf_rate`:
    a subscriber is disconnected after a message."""

    down_rate: float = 0.0
    down_s: Span = (0.0, 600.0)
    failover_rate: float = 0.0
    failover_lost_s: Span = (0.0, 10.0)
    split_rate: float = 0.0
    split_s: Span = (0.0, 30.0)
    evicted_rate: float = 0.0
    killed_rate: float = 0.0
    slow_rate: float = 0.0
    slow_s: Span = (0.001, 1.5)
    deaf_rate: float = 0.0


class FaultRates(msgspec.Struct, frozen=True, kw_only=True):
    """The fault rates of all modelled services of a world."""

    calls: CallFaults = CallFaults()
    dynamodb: DynamoFaults = DynamoFaults()
    sqs: SqsFaults = SqsFaults()
    s3: S3Faults = S3Faults()
    redis: RedisFaults = RedisFaults()


CALM = FaultRates()

FAULTS = (
    "call.refused",
    "call.lost",
    "call.slow",
    "call.stalled",
    "call.late",
    "dynamodb.throttled",
    "dynamodb.throttled_shard",
    "dynamodb.unprocessed_items",
    "dynamodb.unprocessed_keys",
    "dynamodb.conflict",
    "dynamodb.in_progress",
    "dynamodb.stale_read",
    "dynamodb.late_index",
    "dynamodb.late_expiry",
    "dynamodb.never_expires",
    "dynamodb.short_page",
    "dynamodb.empty_page",
    "sqs.duplicate",
    "sqs.undead",
    "sqs.reordered",
    "sqs.false_empty",
    "sqs.lost_receive",
    "sqs.stale_receipt",
    "sqs.visibility_drift",
    "sqs.unseen",
    "sqs.ghost",
    "sqs.over_limit",
    "sqs.retention",
    "sqs.partial_batch",
    "sqs.garbage",
    "s3.slow_down",
    "s3.slow",
    "s3.lost_put",
    "s3.truncated_list",
    "s3.undeleted",
    "s3.left_open",
    "s3.broken_read",
    "redis.down",
    "redis.failover",
    "redis.split",
    "redis.evicted",
    "redis.killed",
    "redis.slow",
    "redis.deaf",
)
"""Every fault that the models count, by its name in reports."""
