"""The unmodified SDK with real servers and workers, on each engine: every public name of the SDK,
and every operation of the contract. Each response is validated with the schemas of the contract."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from zenrows.batch import ZenRowsBatchClient

from tests.api import contract
from tests.contract.sdk_table import TABLE, Use, names_of, public_names
from tests.contract.server import ContractServer, a_receiver
from tests.e2e.cloud import aws_deployment, on_postgres
from tests.e2e.postgres import postgres_deployment
from tests.e2e.programs import a_server, a_site
from tests.servers import a_postgres

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def receiver() -> Iterator[str]:
    with a_receiver() as url:
        yield url


class ContractValidator:
    """Validates every response with the contract, and keeps the operations that succeeded."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()

    def __call__(self, response: httpx.Response) -> None:
        response.read()
        request = response.request
        media_type = response.headers.get("content-type", "").partition(";")[0]
        path = request.url.path
        if media_type in {"application/json", "application/problem+json"}:
            contract.check(request.method, path, response.status_code, media_type, response.json())
        if response.is_success:
            self.seen.add((request.method, path.removeprefix("/v1")))


@pytest.fixture(scope="module", params=["embedded", "postgres", "aws", "mixed"])
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def validator(engine: str) -> ContractValidator:
    return ContractValidator()


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    engine: str,
    validator: ContractValidator,
    receiver: str,
) -> Iterator[ContractServer]:
    folder = tmp_path_factory.mktemp("sdk")
    with a_site() as site, _serving(request, engine, folder) as url:
        hooks = {"event_hooks": {"response": [validator]}}
        base_url = f"{url}/v1"
        with ZenRowsBatchClient("anna", base_url=base_url, retries=0, httpx_args=hooks) as client:
            yield ContractServer(client, site.urls(100), receiver, folder)


@contextmanager
def _serving(request: pytest.FixtureRequest, engine: str, folder: Path) -> Iterator[str]:
    """Runs one process with all roles, or an API and two workers in processes of their own."""
    if engine == "embedded":
        with a_server(folder / "data") as server:
            yield server.url
        return
    if engine == "postgres":
        with postgres_deployment(folder, "fsync=off") as deployment:
            deployment.cloud.workers(2)
            yield deployment.cloud.api()
        return
    if engine == "mixed":
        with a_postgres() as tasks, aws_deployment(request, folder, **on_postgres(tasks)) as cloud:
            cloud.workers(2)
            yield cloud.api()
        return
    with aws_deployment(request, folder, redis=request.getfixturevalue("redis")) as cloud:
        cloud.workers(2)
        yield cloud.api()


def test_the_table_contains_every_public_name_of_the_sdk() -> None:
    assert set(TABLE) == public_names()


@pytest.mark.parametrize("use", dict.fromkeys(TABLE.values()), ids=lambda use: names_of(use)[0])
def test_each_use_of_the_sdk_works(
    server: ContractServer, engine: str, use: Use, record_property: Any
) -> None:
    for name in names_of(use):
        record_property("sdk_method", f"{name} on {engine}")
    use(server)


def test_every_operation_of_the_contract_succeeded_once(
    server: ContractServer, validator: ContractValidator, engine: str, record_property: Any
) -> None:
    """Runs last. Requests the operations that the SDK itself never calls."""
    http = server.client._t._client
    job_id, run_id, task_id = server.job.job_id, server.run.run_id, server.page.task_id
    for path in (f"/jobs/{job_id}", f"/jobs/{job_id}/runs/{run_id}"):
        assert http.get(f"{path}/tasks/{task_id}/content").is_success
    assert http.post(f"/jobs/{server.an_open_job().job_id}/cancel").is_success
    if not validator.seen >= {("POST", "/jobs"), ("POST", "/hmac/keys/rotate")}:
        for use in dict.fromkeys(TABLE.values()):
            use(server)

    operations = _operations()
    missing = [op for op in operations if not any(_matches(op, seen) for seen in validator.seen)]

    answered = f"{len(operations) - len(missing)} of {len(operations)} on {engine}"
    record_property("contract_operations", answered)
    assert missing == []


def _operations() -> list[tuple[str, str]]:
    document = contract.load()
    if document is None:
        pytest.skip("the contract is not at hand")
    methods = {"get", "post", "put", "delete"}
    paths = document["paths"].items()
    return [(m.upper(), path) for path, item in paths for m in item if m in methods]


def _matches(operation: tuple[str, str], seen: tuple[str, str]) -> bool:
    method, template = operation
    return method == seen[0] and bool(re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", template), seen[1]))
