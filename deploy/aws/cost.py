"""Prints what a deployment of service.yaml costs a month, idle and at a million pages a day.

    python3 deploy/aws/cost.py [--pages 1000000] [--page-kb 20] [--workers 2] [--redis] [--spot]
                               [--no-insights]

Prices are the list prices of us-east-1 below. What a page and an idle worker take is metered by
`python -m bench cost`; tests/deploy/test_costs.py meters it again and compares. Traffic into AWS is
free; results that callers download are a line of their own; taxes and free tiers are not included.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

HOURS = 730
DAYS = 30.4

# Inputs 1: prices in USD, us-east-1, on demand, Linux on x86.
FARGATE_VCPU_HOUR = 0.04048
FARGATE_GB_HOUR = 0.004445
SPOT_SHARE = 0.30  # Spot is about 70 % cheaper.
ALB_HOUR = 0.0225
ALB_LCU_HOUR = 0.008
IPV4_HOUR = 0.005
REDIS_NODE_HOUR = {"cache.t4g.micro": 0.0128}  # Valkey; two nodes.
DYNAMODB_WRITE_MILLION = 0.625
DYNAMODB_READ_MILLION = 0.125
DYNAMODB_GB_MONTH = 0.25
PITR_GB_MONTH = 0.20
SQS_MILLION = 0.40
S3_PUT_THOUSAND = 0.005
S3_GET_THOUSAND = 0.0004
S3_GB_MONTH = 0.023
TRAFFIC_OUT_GB = 0.09
LOGS_GB = 0.50
ALARM_MONTH = 0.10
DASHBOARD_MONTH = 3.00
METRIC_MONTH = 0.30  # Also each metric of Container Insights.
SECRET_MONTH = 0.40


@dataclass(frozen=True)
class Use:
    """What AWS bills for one page: units of DynamoDB, requests of SQS and S3, and stored bytes."""

    write_units: float
    read_units: float
    sqs_requests: float
    s3_puts: float
    row_bytes: float


@dataclass(frozen=True)
class IdleUse:
    """What AWS bills for an hour of a worker without work, which polls."""

    write_units: float
    read_units: float
    sqs_requests: float


# Inputs 2: what a page takes, and an idle worker. Metered on two workers of this template: a list
# of 10,000 pages of 2 s that fills their slots, and beside it 50 lists of 10 pages, which take
# several times as much for each page. Pages share objects on S3 (PackWaitMs).
#   python -m bench cost --workers 2 --slots 200 --part 10000 --callers 50 [--no-redis]
#   python -m bench small_jobs --workers 2 --jobs 1 [--no-redis]
USE = {
    "redis": Use(3.49, 0.70, 0.353, 0.0149, 719),
    "no redis": Use(4.43, 0.86, 0.348, 0.0150, 721),  # Each lease is a row.
}
IDLE = {
    "redis": IdleUse(0, 6_954, 180),
    "no redis": IdleUse(780, 7_797, 180),
}
LOG_BYTES_PAGE = 10

# Inputs 3: how long it is kept, the defaults of CONVEYOR_BODY_DAYS and CONVEYOR_ROW_DAYS.
BODY_DAYS = 30
ROW_DAYS = BODY_DAYS + 30

# Inputs 4: what the templates create.
LOGS_GB_MONTH = 0.2  # Of idle processes, which log their demand once a minute.
ALARMS = 6 + 4  # Ours, and two for each of the two scaling policies.
METRICS = 4 + 1  # Of the demand (actors/demand_reporter.py), and the errors in the logs.
SECRETS = 4  # With Redis one more.
# Container Insights has 10 metrics for the cluster, for each of the two services and for each of
# the two task definitions, 5 more for each service and 2 more for the cluster. Beside them it logs
# about 2 KB for each task and minute.
INSIGHTS_METRICS = 10 * (1 + 2 + 2) + 5 * 2 + 2
INSIGHTS_LOG_KB = 2.0


@dataclass(frozen=True)
class Size:
    tasks: float
    vcpu: float
    gb: float

    def month(self) -> float:
        return self.tasks * HOURS * (self.vcpu * FARGATE_VCPU_HOUR + self.gb * FARGATE_GB_HOUR)


def bill(
    pages_day: float, page_kb: float, workers: float, *, redis: bool, spot: bool, insights: bool
) -> dict[str, float]:
    pages = pages_day * DAYS
    api, fleet = Size(2, 0.5, 1), Size(workers, 1, 2)
    on_spot = max(0.0, workers - 2) * 0.75 if spot else 0.0
    discount = Size(on_spot, 1, 2).month() * (1 - SPOT_SHARE)
    store = "redis" if redis else "no redis"
    use, resting, hours = USE[store], IDLE[store], workers * HOURS
    insights_gb = (api.tasks + workers) * HOURS * 60 * INSIGHTS_LOG_KB / 1e6
    rows_gb = pages_day * ROW_DAYS * use.row_bytes / 1e9
    return {
        "API, 2 tasks of 0.5 vCPU and 1 GB": api.month(),
        f"workers, {workers:g} of 1 vCPU and 2 GB": fleet.month() - discount,
        "load balancer": HOURS * (ALB_HOUR + ALB_LCU_HOUR * (0.1 + pages_day / 1e7)),
        "public addresses": HOURS * IPV4_HOUR * (2 + workers + 2),
        "Redis, 2 x cache.t4g.micro": 2 * HOURS * REDIS_NODE_HOUR["cache.t4g.micro"] * redis,
        "DynamoDB writes": DYNAMODB_WRITE_MILLION
        * (pages * use.write_units + hours * resting.write_units)
        / 1e6,
        "DynamoDB reads": DYNAMODB_READ_MILLION
        * (pages * use.read_units + hours * resting.read_units)
        / 1e6,
        "DynamoDB storage and recovery": rows_gb * (DYNAMODB_GB_MONTH + PITR_GB_MONTH),
        "SQS": SQS_MILLION * (pages * use.sqs_requests + hours * resting.sqs_requests) / 1e6,
        "S3 requests": pages * use.s3_puts * S3_PUT_THOUSAND / 1e3,
        "S3 storage": pages_day * BODY_DAYS * page_kb * 1e3 / 1e9 * S3_GB_MONTH,
        "logs, metrics, alarms, secrets": (
            (LOGS_GB_MONTH + pages * LOG_BYTES_PAGE / 1e9) * LOGS_GB
            + ALARMS * ALARM_MONTH
            + DASHBOARD_MONTH
            + METRICS * METRIC_MONTH
            + (SECRETS + redis) * SECRET_MONTH
        ),
        "Container Insights": (INSIGHTS_METRICS * METRIC_MONTH + insights_gb * LOGS_GB) * insights,
    }


def download(page_kb: float) -> float:
    """The price of a million pages that callers download one by one, through the API."""
    return page_kb * (TRAFFIC_OUT_GB + ALB_LCU_HOUR) + S3_GET_THOUSAND * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pages", type=float, default=1e6, help="pages a day under load")
    parser.add_argument("--page-kb", type=float, default=20.0, help="KB of a body")
    parser.add_argument("--workers", type=float, default=2.0, help="workers on average under load")
    parser.add_argument("--redis", action="store_true", help="with RedisNodeType=cache.t4g.micro")
    parser.add_argument("--spot", action="store_true", help="with WorkerSpot=true")
    parser.add_argument(
        "--no-insights", action="store_true", help="with ContainerInsights=disabled"
    )
    options = parser.parse_args()
    parameters = {
        "redis": options.redis,
        "spot": options.spot,
        "insights": not options.no_insights,
    }
    idle = bill(0, options.page_kb, 2, **parameters)
    loaded = bill(options.pages, options.page_kb, options.workers, **parameters)
    lines = [f"| USD a month | idle | {options.pages:,.0f} pages a day |", "|---|---|---|"]
    for name, cost in loaded.items():
        resting = idle.get(name, next(v for k, v in idle.items() if k[:6] == name[:6]))
        if cost or resting:
            lines.append(f"| {name} | {resting:,.2f} | {cost:,.2f} |")
    total = sum(loaded.values())
    lines.append(f"| **total** | **{sum(idle.values()):,.0f}** | **{total:,.0f}** |")
    per_million = (
        (total - sum(idle.values())) / (options.pages * DAYS) * 1e6 if options.pages else 0
    )
    lines.append(f"\nEach further million pages: {per_million:,.2f} USD.")
    lines.append(f"Each million pages that callers download: {download(options.page_kb):,.2f} USD.")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
