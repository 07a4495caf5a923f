"""`python -m bench NAME` runs one benchmark; without a name it lists them."""

from __future__ import annotations

import importlib
import sys

QUESTIONS = {
    "settle": "How many tasks a second can the embedded engine settle, compared with bare SQLite?",
    "submit": "How long does a submit of 1, 100 and 9,999 tasks take, compared with bare SQLite?",
    "ingest": "How fast is a list of a million lines ingested, compared with a bare INSERT loop?",
    "local_ingest": "How long does a deployment on local servers take to ingest a list?",
    "million": "Does a job of a million lines work from submit to deletion? How much memory?",
    "postgres_growth": "Do the tables, dead rows and WAL of PostgreSQL stop growing in a long run?",
    "scrape": "What does `conveyor scrape` cost from start to exit, compared with a bare loop?",
    "service": "What does a page cost through the API of `conveyor dev`, compared with a loop?",
    "throughput": "What does a durable page cost, compared with a loop that stores no state?",
    "flatness": "Does a page cost the same in a list of 1,000 pages and in a list of 100,000?",
    "amplification": "How often is a message received before its task runs, at the job's cap?",
    "body_memory": "How much memory do 200 bodies of 25 MiB need at the same time?",
    "export": "How long does an export take, and how much memory, compared with zipfile?",
    "httpclient": "How much CPU does one request cost with our pool, aiohttp and httpx?",
    "clients": "How much CPU do 10,000 downloads cost with each client of the SDK?",
    "cost": "What is the AWS bill of a million tasks, for one list alone and on a shared fleet?",
    "cost_processes": "Do six real processes make as many calls as the model of `cost` says?",
    "cost_steps": "What does a task cost on AWS by step, compared with the reference design?",
    "small_jobs": "What do a job of ten tasks and an idle worker cost on AWS, by step?",
    "scale": "Which resource limits a fleet on AWS next, and what raises that limit?",
    "autoscaling": "Which metric should workers on AWS be scaled on?",
    "awsclient": "How much CPU does one call to AWS cost with our client and with aioboto3?",
    "dashboard": "What do the first page of the dashboard and a run with 20 watchers cost?",
    "render": "What does a rendered page cost at our gateway, with Playwright and with crawlee?",
    "walk": "Which modules and functions does one task execute, from POST to result and webhook?",
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
