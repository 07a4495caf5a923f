"""Makes the OpenAPI document from the types and the route table, so that it always matches
them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec

import conveyor
from conveyor.api.routes.route import Access, Command, Route, Upload
from conveyor.api.server.problem import MEDIA_TYPE
from conveyor.api.server.request_context import JSON
from conveyor.domain import limits
from conveyor.domain.ids import TASK_ID_PATTERN, ULID_PATTERN
from conveyor.schemas.responses import ProblemResponse

_ABOUT = (
    "A durable inbox for scrape jobs: post a list of URLs, watch the run, fetch every body. "
    "A job is run one or more times; a run has one task per line of the list. "
    "Errors are problem details after RFC 9457."
)
_TAGS = {
    "jobs": "Lists of URLs, and what holds for all of them.",
    "runs": "Executions of a job.",
    "job_inputs": "Lists that are uploaded before they are submitted.",
    "tasks": "Single URLs of a run, and their bodies.",
    "events": "What happened, in order.",
    "webhook": "Trying a receiver out.",
    "hmac": "The keys that sign webhooks.",
    "operations": "For those who run the service.",
}
_PATTERNS = {
    "job_id": ULID_PATTERN,
    "run_id": ULID_PATTERN,
    "task_id": TASK_ID_PATTERN,
    "event_id": "^[0-9A-Z]{26}$",
    "export_id": ULID_PATTERN,
    "input_id": ULID_PATTERN,
}
_NAMES = re.compile(r"\{(\w+)\}")
# Any request may be malformed, name an unknown parameter, or have a head that is too long.
_HTTP = (400, 414, 431)
_ALWAYS = (401, 500)
_WITH_A_KEY = (400, 408, 409, 503)
_IDEMPOTENCY_KEY = rf"^[\x20-\x7e]{{1,{limits.IDEMPOTENCY_KEY_CHARS_MAX}}}$"
_REF = "#/components/schemas/{name}"


def make_document(routes: Iterable[Route]) -> bytes:
    routes = tuple(routes)
    types = _types_of(routes)
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    known = dict(zip(types, schemas, strict=True))
    # The type accepts a task without a URL, because the list validator reports it with its line.
    # The document says that the URL is required.
    components["TaskInput"]["required"] = ["url"]
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation = _operation(route, known)
        for status in route.answers:
            operation["responses"][str(status)].update(_links(route, routes))
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    document = {
        "openapi": "3.1.0",
        "info": {"title": "Conveyor", "version": conveyor.__version__, "description": _ABOUT},
        "tags": [{"name": name, "description": text} for name, text in _TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"}},
        },
    }
    return msgspec.json.encode(document)


def _types_of(routes: tuple[Route, ...]) -> list[type]:
    types: dict[type, None] = {ProblemResponse: None}
    for route in routes:
        if isinstance(route.does, Command) and route.does.payload is not None:
            types[route.does.payload] = None
        types |= {kind: None for kind in route.answers.values() if isinstance(kind, type)}
    return list(types)


def _operation(route: Route, known: Mapping[type, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "tags": [route.tag],
        "summary": route.summary,
        "parameters": [*_path_parameters(route), *_query_parameters(route), *_headers(route)],
        "responses": _responses(route, known),
        "security": _security(route),
    }
    if isinstance(route.does, Command) and route.does.payload is not None:
        schema = known[route.does.payload]
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    if isinstance(route.does, Upload):
        operation["requestBody"] = {"required": True, "content": {"*/*": {"schema": {}}}}
    return operation


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "pattern": _PATTERNS[name]},
        }
        for name in _NAMES.findall(route.path)
    ]


def _query_parameters(route: Route) -> list[dict[str, Any]]:
    return [
        {
            "name": each.name,
            "in": "query",
            "schema": dict(each.schema),
            "description": each.description,
        }
        for each in route.query
    ]


def _headers(route: Route) -> list[dict[str, Any]]:
    if route.method != "POST":
        return []
    schema = {"type": "string", "pattern": _IDEMPOTENCY_KEY}
    about = "The same key with the same request happens once, and is answered the same each time."
    return [{"name": "Idempotency-Key", "in": "header", "schema": schema, "description": about}]


def _security(route: Route) -> list[dict[str, list[str]]]:
    ways: dict[Access, list[dict[str, list[str]]]] = {
        Access.KEY: [{"apiKey": []}],
        Access.LINK: [{"apiKey": []}, {}],
        Access.PUBLIC: [{}],
    }
    return ways[route.access]


def _responses(route: Route, known: Mapping[type, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, kind in route.answers.items():
        answer: dict[str, Any] = {"description": HTTPStatus(status).phrase}
        if isinstance(kind, str):
            answer["content"] = {kind: {"schema": {}}}
        elif kind is not None:
            answer["content"] = {JSON: {"schema": known[kind]}}
        responses[str(status)] = answer
    for status in sorted({*route.problems, *_common(route)}):
        responses[str(status)] = {
            "description": HTTPStatus(status).phrase,
            "content": {MEDIA_TYPE: {"schema": known[ProblemResponse]}},
        }
    return responses


def _links(route: Route, routes: tuple[Route, ...]) -> dict[str, Any]:
    """Links this operation to every operation that needs an id from its response."""
    known = {name: f"$request.path.{name}" for name in _NAMES.findall(route.path)}
    known |= {name: f"$response.body#{pointer}" for name, pointer in route.gives.items()}
    links = {
        each.name: {"operationId": each.name, "parameters": {name: known[name] for name in asked}}
        for each in routes
        if (asked := set(_NAMES.findall(each.path))) <= set(known) and asked & set(route.gives)
    }
    return {"links": links} if links else {}


def _common(route: Route) -> tuple[int, ...]:
    if route.access is Access.PUBLIC:
        return _HTTP
    if route.method == "POST":
        return (*_HTTP, *_ALWAYS, *_WITH_A_KEY)
    return (*_HTTP, *_ALWAYS, 408) if route.method == "PUT" else (*_HTTP, *_ALWAYS)
