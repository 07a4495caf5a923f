"""`python -m bench NAME`: runs one benchmark; without a name, lists them."""

from __future__ import annotations

import importlib
import sys

QUESTIONS = {
    "settle": "How many tasks a second can the embedded engine settle, beside bare SQLite?",
    "submit": "How long does a submit of 1, 100 and 9,999 tasks take, beside bare SQLite?",
    "ingest": "How fast is a list of a million lines ingested, beside a bare INSERT loop?",
    "local_ingest": "How long does a deployment on local servers take to ingest a list?",
    "million": "Does a job of a million lines work from end to end, and in how much memory?",
    "postgres_growth": "Do tables, dead rows and WAL of Postgres stay flat over a long run?",
    "scrape": "What does `conveyor scrape` cost from start to exit, beside a bare loop and curl?",
    "service": "What does a page cost through the API of `conveyor dev`, beside a bare loop?",
    "throughput": "What does a page cost, durably, beside a bare loop that keeps nothing?",
    "flatness": "Does a page cost the same in a list of a thousand and of a hundred thousand?",
    "amplification": "How often is a message received before it is run, at a cap?",
    "body_memory": "How much memory do 200 bodies of 25 MiB at once need?",
    "export": "How long does an export take, and how much memory, beside a bare zipfile?",
    "httpclient": "What does one request cost our pool, aiohttp and httpx?",
    "clients": "What do 10,000 downloads cost the asyncio and sync client, beside the Trio client?",
    "cost": "What does a million tasks cost on AWS, alone and on a fleet: the whole bill?",
    "cost_processes": "Do six real processes make as many calls as the model of `cost` says?",
    "cost_steps": "What does a task cost on AWS by step, beside the reference design?",
    "small_jobs": "What do a job of ten tasks and an hour without work cost on AWS, by step?",
    "scale": "Where is the next limit of a fleet on AWS, and what lifts it?",
    "autoscaling": "Which metric should workers on AWS be scaled by?",
    "awsclient": "What does one call to AWS cost our lean client, and aioboto3?",
    "dashboard": "What does the dashboard cost: its first page, and a run that 20 pages watch?",
    "render": "What does a rendered page cost at our gateway, beside Playwright and crawlee?",
    "walk": "Which modules and functions does one task pass, from POST to result and webhook?",
}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in QUESTIONS:
        print("usage: python -m bench NAME [options]\n")
        for known, question in QUESTIONS.items():
            print(f"  {known:14} {question}")
        sys.exit(0 if not name else 2)
    importlib.import_module(f"bench.{name}").main(sys.argv[2:])


if __name__ == "__main__":
    main()
