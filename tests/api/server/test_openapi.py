"""The document describes everything that it names, and its examples are true."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest

from conveyor.api.route import Route
from conveyor.api.server.app import ROUTES
from conveyor.api.server.openapi import REFERENCE, Reference, make_document
from tests.api import examples
from tests.api.world import World

DOCUMENT: dict[str, Any] = msgspec.json.decode(make_document(ROUTES))
RECORDED = msgspec.json.decode(REFERENCE.read_bytes(), type=Reference)
SCHEMAS = DOCUMENT["components"]["schemas"]
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")


def operations() -> Iterator[tuple[str, dict[str, Any]]]:
    for methods in DOCUMENT["paths"].values():
        for operation in methods.values():
            yield operation["operationId"], operation


def values_of(node: Any, key: str) -> Iterator[Any]:
    """Everything that stands under this key, at any depth."""
    if isinstance(node, dict):
        if key in node:
            yield node[key]
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from values_of(child, key)


def expected_status(route: Route) -> int:
    return route.example.status or min(route.answers)


def name_of(route: Route) -> str:
    return route.name


def test_every_operation_parameter_and_response_is_described() -> None:
    missing = []
    for name, operation in operations():
        described = [operation, *operation["parameters"]]
        described += [
            described_part
            for described_part in operation["responses"].values()
            if "$ref" not in described_part
        ]
        missing += [name for part in described if not part.get("description")]

    assert missing == []
    assert all(response["description"] for response in DOCUMENT["components"]["responses"].values())
    assert all(
        scheme["description"] for scheme in DOCUMENT["components"]["securitySchemes"].values()
    )


def test_every_schema_and_every_field_is_described() -> None:
    fields = {
        f"{name}.{field}": value
        for name, schema in SCHEMAS.items()
        for field, value in schema.get("properties", {}).items()
    }
    nested = [
        value for schema_part in values_of(SCHEMAS, "properties") for value in schema_part.values()
    ]

    assert [name for name, schema in SCHEMAS.items() if not schema.get("description")] == []
    assert [name for name, value in fields.items() if not value.get("description")] == []
    assert [value for value in nested if not value.get("description")] == []


def test_every_value_of_an_enumeration_is_described() -> None:
    missing = [
        (name, value)
        for name, schema in SCHEMAS.items()
        for value in schema.get("enum", ())
        if not re.search(rf"^- `{re.escape(value)}`: .", schema["description"], re.MULTILINE)
    ]

    assert missing == []


def test_no_pattern_looks_ahead_or_behind() -> None:
    patterns = list(values_of(DOCUMENT, "pattern"))

    assert len(patterns) > 10
    assert [pattern for pattern in patterns if _LOOK_AROUND.search(pattern)] == []


def test_every_operation_with_a_body_shows_an_example_that_its_schema_accepts() -> None:
    bodies = {
        name: next(iter(operation["requestBody"]["content"].values()))
        for name, operation in operations()
        if "requestBody" in operation
    }

    assert bodies
    for media in bodies.values():
        assert media["example"] is not None
        schema = {**media["schema"], "components": DOCUMENT["components"]}
        jsonschema.Draft202012Validator(schema).validate(media["example"])


@pytest.mark.parametrize("route", ROUTES, ids=name_of)
async def test_the_example_is_answered_as_the_document_says(route: Route) -> None:
    operation = DOCUMENT["paths"][route.path][route.method.lower()]

    seen, ids = await examples.send_example(route)

    assert seen.status == expected_status(route)
    response_schema = operation["responses"][str(seen.status)]
    assert ids == {
        parameter["name"]: parameter["example"]
        for parameter in operation["parameters"]
        if parameter["in"] == "path"
    }
    if isinstance(route.answers[seen.status], type):
        media = response_schema["content"]["application/json"]
        schema = {**media["schema"], "components": DOCUMENT["components"]}
        jsonschema.Draft202012Validator(schema).validate(seen.json)
        assert seen.json == media["example"]


@pytest.mark.parametrize("status", examples.REFUSED)
async def test_the_example_of_a_refusal_is_a_real_one(status: int) -> None:
    seen = await examples.send_refused(status)

    content = DOCUMENT["components"]["responses"][str(status)]["content"]
    assert seen.status == status
    assert seen.json == content["application/problem+json"]["example"]


async def test_every_link_of_the_page_leads_somewhere(world: World) -> None:
    page = (await world.get("/docs", key=None)).body.decode()

    targets = set(re.findall(r'href="#([^"]+)"', page))
    names = re.findall(r'\bid="([^"]+)"', page)
    assert {f"schema-{name}" for name in SCHEMAS} <= set(names)
    assert len(names) == len(set(names))
    assert sorted(targets - set(names)) == []


async def test_the_page_loads_only_files_of_this_server(world: World) -> None:
    page = await world.get("/docs", key=None)
    html = page.body.decode()

    assert all(route.path in html for route in ROUTES)
    loaded = re.findall(r'<(?:script|link|img)\b[^>]*(?:src|href)="([^"]+)"', html)
    assert sorted(loaded) == ["/docs/docs.css", "/docs/docs.js", "/docs/docs.svg"]
    for path in loaded:
        file = await world.get(path, key=None)
        assert file.status == 200
        assert re.search(rb"https?://(?!www\.w3\.org/2000/svg)", file.body) is None
    assert "<style" not in html
    assert re.search(r"\son\w+=|<script>|\sstyle=", html) is None


async def test_the_page_can_neither_be_framed_nor_load_foreign_content(world: World) -> None:
    page = await world.get("/docs")

    policy = page.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert page.headers["X-Frame-Options"] == "DENY"


async def test_the_page_has_no_other_files(world: World) -> None:
    for name in ("docs.html", "..%2Fopenapi.py", "none"):
        assert (await world.get(f"/docs/{name}", key=None)).status == 404


async def test_the_page_shows_authentication_examples_and_errors(world: World) -> None:
    html = (await world.get("/docs", key=None)).body.decode()

    assert "X-API-Key" in html
    assert "curl -X POST" in html
    for status, operation in DOCUMENT["components"]["responses"].items():
        assert f'id="error-{status}"' in html
        assert operation["description"]
    for operation_id, _ in operations():
        assert f'id="{operation_id}"' in html
