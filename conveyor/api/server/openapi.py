"""Makes the OpenAPI document from the types and the route table, so that it always matches them.

`make docs` writes reference.json: the doc comments of the types, and the responses that the memory
engine gave to the examples of the routes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec

import conveyor
from conveyor.api.route import Access, Command, Parameter, Route, Upload
from conveyor.api.server.problem import MEDIA_TYPE
from conveyor.api.server.request import JSON
from conveyor.domain import limits
from conveyor.domain.ids import TASK_ID_PATTERN, ULID_PATTERN
from conveyor.schemas.problem_codes import PROBLEM_CODES
from conveyor.schemas.responses import ProblemResponse

_ABOUT = (
    "A durable batch-scraping service: post a list of URLs, watch the run, fetch every body. "
    "A job is run one or more times; a run has one task per line of the list. "
    "Errors are problem details after RFC 9457."
)
_TAGS = {
    "jobs": "Lists of URLs with common settings.",
    "runs": "Executions of a job.",
    "crawls": "Jobs that find their own pages.",
    "job_inputs": "Lists that are uploaded before they are submitted.",
    "tasks": "Single URLs of a run, and their bodies.",
    "events": "The event log.",
    "webhook": "Tests of a receiver.",
    "hmac": "The keys that sign webhooks.",
    "operations": "For the operator of the service.",
}
# The pattern and the description of each variable of a path.
_VARIABLES = {
    "job_id": (ULID_PATTERN, "The id of the job."),
    "run_id": (ULID_PATTERN, "The id of the run."),
    "task_id": (TASK_ID_PATTERN, "The id of the task."),
    "crawl_id": (ULID_PATTERN, "The id of the crawl."),
    "content_id": (TASK_ID_PATTERN, "The id of a kept page."),
    "event_id": ("^[0-9A-Z]{26}$", "The id of the webhook event."),
    "export_id": (ULID_PATTERN, "The id of the export."),
    "input_id": (ULID_PATTERN, "The id of the slot."),
    "file": (r"^docs\.(css|js|svg)$", "The name of the file."),
}
_DESCRIPTIONS = {
    200: "The operation was successful.",
    201: "The resource was created.",
    202: "The request was accepted, and the work goes on after the response.",
    204: "The operation was successful. The response has no body.",
    206: "The requested part of the file.",
    302: "The storage serves the file itself, at the address in `Location`.",
}
# The problem of a failed task is that of its last attempt, so its codes are the gateway's.
_FAILED_TASK = 422
_KEY_ABOUT = (
    "The key that the operator gave to the caller, once per request: 1 to 256 printable ASCII "
    "characters. Jobs belong to the caller that its key names."
)
REFERENCE = Path(__file__).with_name("reference.json")
_NAMES = re.compile(r"\{(\w+)\}")
# Any request may be malformed, name an unknown parameter, or have a head that is too long.
_ANY_REQUEST = frozenset({400, 414, 431})
_AUTHENTICATED = frozenset({401, 429, 500})
_WITH_A_KEY = frozenset({400, 408, 409, 503})
_WITH_A_BODY = frozenset({413, 415})
_IDEMPOTENCY_KEY = rf"^[\x20-\x7e]{{1,{limits.IDEMPOTENCY_KEY_CHARS_MAX}}}$"
_REF = "#/components/schemas/{name}"


def make_document(routes: Iterable[Route]) -> bytes:
    routes = tuple(routes)
    types = types_of(routes)
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    known = dict(zip(types, schemas, strict=True))
    # The type accepts a task without a URL, because the list validator reports it with its line.
    # The document says that the URL is required.
    components["TaskInput"]["required"] = ["url"]
    _describe(components)
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
            "responses": {str(status): _problem(status, known) for status in _STATUSES},
            "securitySchemes": {
                "apiKey": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "X-API-Key",
                    "description": _KEY_ABOUT,
                }
            },
        },
    }
    # In JSON Schema `$` matches at the very end only. The look-ahead is for Python, where it also
    # matches before a final line break, and generators of clients refuse it.
    return msgspec.json.encode(document).replace(rb"$(?!\\n)", b"$")


class ExampleResponse(msgspec.Struct, frozen=True):
    """What the example of an operation was answered with. `path` has the ids of its path. `body` is
    absent if the response is not JSON."""

    status: int
    path: dict[str, str] = {}
    body: Any = None


class Reference(msgspec.Struct, frozen=True):
    """The content of reference.json. `types` has the doc comments of each type by field, or by
    value of an enumeration. `problems` has one refusal of each of some statuses."""

    types: dict[str, dict[str, str]]
    responses: dict[str, ExampleResponse]
    problems: dict[int, dict[str, Any]]


@cache
def _reference() -> Reference:
    if not REFERENCE.exists():
        return Reference({}, {}, {})
    return msgspec.json.decode(REFERENCE.read_bytes(), type=Reference)


def _example_of(route: Route) -> ExampleResponse:
    # A new route has none until `make docs` has sent its example.
    return _reference().responses.get(route.name, ExampleResponse(0))


def _describe(components: Mapping[str, Any]) -> None:
    """Adds the doc comments of the types to their schemas."""
    for name, schema in components.items():
        words = _reference().types.get(name, {})
        for field, value in schema.get("properties", {}).items():
            value["description"] = words.get(field, "")
        if "enum" in schema:
            meanings = [f"- `{value}`: {words.get(value, '')}" for value in schema["enum"]]
            schema["description"] = "\n".join([schema["description"], "", *meanings])


def types_of(routes: tuple[Route, ...]) -> list[type]:
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
        "description": route.description,
        "parameters": [*_path_parameters(route), *_query_parameters(route), *_headers(route)],
        "responses": _responses(route, known),
        "security": _security(route),
    }
    if isinstance(route.does, Command) and route.does.payload is not None:
        media = {"schema": known[route.does.payload], "example": route.example.body}
        is_required = not route.does.is_body_optional
        operation["requestBody"] = {"required": is_required, "content": {JSON: media}}
    if isinstance(route.does, Upload):
        media = {"schema": {}, "example": route.example.body}
        operation["requestBody"] = {"required": True, "content": {"*/*": media}}
    return operation


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    ids = _example_of(route).path
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "pattern": _VARIABLES[name][0]},
            "description": _VARIABLES[name][1],
            "example": ids.get(name, ""),
        }
        for name in _NAMES.findall(route.path)
    ]


def _query_parameters(route: Route) -> list[dict[str, Any]]:
    return [
        {
            "name": parameter.name,
            "in": "query",
            "schema": dict(parameter.schema),
            "description": parameter.description,
            **_query_example(route, parameter),
        }
        for parameter in route.query
    ]


def _query_example(route: Route, parameter: Parameter) -> dict[str, Any]:
    text = route.example.query.get(parameter.name)
    if text is None:
        return {}
    return {"example": int(text) if parameter.schema["type"] == "integer" else text}


def _headers(route: Route) -> list[dict[str, Any]]:
    if route.method != "POST":
        return []
    schema = {"type": "string", "pattern": _IDEMPOTENCY_KEY}
    about = "A request is executed once per key. A repetition gets the same response."
    return [{"name": "Idempotency-Key", "in": "header", "schema": schema, "description": about}]


def _security(route: Route) -> list[dict[str, list[str]]]:
    ways: dict[Access, list[dict[str, list[str]]]] = {
        Access.KEY: [{"apiKey": []}],
        Access.LINK: [{"apiKey": []}, {}],
        Access.PUBLIC: [{}],
    }
    return ways[route.access]


def _responses(route: Route, known: Mapping[type, Any]) -> dict[str, Any]:
    example = _example_of(route)
    responses: dict[str, Any] = {}
    for status, kind in route.answers.items():
        answer: dict[str, Any] = {"description": _DESCRIPTIONS[status]}
        if isinstance(kind, str):
            answer["content"] = {kind: {"schema": {}}}
        elif kind is not None:
            media = {"schema": known[kind]}
            if status == example.status:
                media["example"] = example.body
            answer["content"] = {JSON: media}
        responses[str(status)] = answer
    for status in sorted(_problems(route)):
        responses[str(status)] = {"$ref": f"#/components/responses/{status}"}
    return responses


_STATUSES = sorted({*PROBLEM_CODES, _FAILED_TASK})


def _problem(status: int, known: Mapping[type, Any]) -> dict[str, Any]:
    """The response with which any operation is refused with this status."""
    media: dict[str, Any] = {"schema": known[ProblemResponse]}
    if status in _reference().problems:
        media["example"] = _reference().problems[status]
    if status == _FAILED_TASK:
        return {
            "description": "The task failed. The problem is that of its last attempt.",
            "content": {MEDIA_TYPE: media},
        }
    phrase = HTTPStatus(status).phrase
    codes = [f"- `{code}`: {meaning}" for code, meaning in PROBLEM_CODES[status].items()]
    return {
        "description": "\n".join([f"{phrase}. Codes:", "", *codes]),
        "content": {MEDIA_TYPE: media},
    }


def _links(route: Route, routes: tuple[Route, ...]) -> dict[str, Any]:
    """Links this operation to every operation that needs an id from its response."""
    known = {name: f"$request.path.{name}" for name in _NAMES.findall(route.path)}
    known |= {name: f"$response.body#{pointer}" for name, pointer in route.gives.items()}
    links = {
        other.name: {"operationId": other.name, "parameters": {name: known[name] for name in names}}
        for other in routes
        if (names := set(_NAMES.findall(other.path))) <= set(known) and names & set(route.gives)
    }
    return {"links": links} if links else {}


def _problems(route: Route) -> set[int]:
    """The statuses of refusals: those that the route names, and those that follow from its form."""
    statuses = {*route.problems, *_ANY_REQUEST}
    if route.access is Access.PUBLIC:
        return statuses
    statuses |= _AUTHENTICATED
    if _NAMES.search(route.path):
        statuses.add(404)
    if route.method == "POST":
        statuses |= _WITH_A_KEY
    if route.method == "PUT":
        statuses.add(408)
    if isinstance(route.does, Command | Upload):
        statuses.add(503)
    if isinstance(route.does, Upload) or (isinstance(route.does, Command) and route.does.payload):
        statuses |= _WITH_A_BODY
    return statuses
