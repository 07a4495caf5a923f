"""Makes the OpenAPI document from the types and the route table, so that it always matches
them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from html import escape
from http import HTTPStatus
from typing import Any

import msgspec

import conveyor
from conveyor.api.route import Access, Command, Route, Upload
from conveyor.api.server.problem import MEDIA_TYPE
from conveyor.api.server.request import JSON
from conveyor.domain import limits
from conveyor.domain.ids import TASK_ID_PATTERN, ULID_PATTERN
from conveyor.schemas.responses import ProblemResponse

_ABOUT = (
    "A durable inbox for scrape jobs: post a list of URLs, watch the run, fetch every body. "
    "A job is run one or more times; a run has one task per line of the list. "
    "Errors are problem details after RFC 9457."
)
_TAGS = {
    "jobs": "Lists of URLs with common settings.",
    "runs": "Executions of a job.",
    "job_inputs": "Lists that are uploaded before they are submitted.",
    "tasks": "Single URLs of a run, and their bodies.",
    "events": "The event log.",
    "webhook": "Tests of a receiver.",
    "hmac": "The keys that sign webhooks.",
    "operations": "For the operator of the service.",
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
_ANY_REQUEST = frozenset({400, 414, 431})
_AUTHENTICATED = frozenset({401, 500})
_WITH_A_KEY = frozenset({400, 408, 409, 503})
_WITH_A_BODY = frozenset({413, 415})
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
    # In JSON Schema `$` matches at the very end only. The look-ahead is for Python, where it also
    # matches before a final line break, and generators of clients refuse it.
    return msgspec.json.encode(document).replace(rb"$(?!\\n)", b"$")


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
            "name": parameter.name,
            "in": "query",
            "schema": dict(parameter.schema),
            "description": parameter.description,
        }
        for parameter in route.query
    ]


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
    responses: dict[str, Any] = {}
    for status, kind in route.answers.items():
        answer: dict[str, Any] = {"description": HTTPStatus(status).phrase}
        if isinstance(kind, str):
            answer["content"] = {kind: {"schema": {}}}
        elif kind is not None:
            answer["content"] = {JSON: {"schema": known[kind]}}
        responses[str(status)] = answer
    for status in sorted(_problems(route)):
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


# The document as one HTML page. The page has no script and loads nothing, so that it works offline
# and under a strict policy.


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem;
       color: #1b1f24; background: #fff; }
@media (prefers-color-scheme: dark) { body { color: #e6e6e6; background: #16181b; }
       code, pre, summary { background: #22262b !important; } a { color: #8ab4f8; } }
h2 { margin-top: 2.5rem; }
code, pre { font: 14px/1.5 ui-monospace, monospace; background: #f3f4f6; border-radius: 4px; }
code { padding: .1em .3em; }
pre { padding: .8rem; overflow-x: auto; }
details { margin: .4rem 0; }
summary { cursor: pointer; padding: .4rem .6rem; background: #f3f4f6; border-radius: 4px; }
summary b { display: inline-block; width: 4.5rem; }
summary span { opacity: .75; }
"""


def page_of(document: bytes) -> str:
    """Renders every operation of an OpenAPI document and every schema that it names."""
    spec: dict[str, Any] = msgspec.json.decode(document)
    title = escape(f"{spec['info']['title']} {spec['info']['version']}")
    groups: dict[str, list[str]] = {}
    for path, methods in spec["paths"].items():
        for method, operation in methods.items():
            groups.setdefault(operation["tags"][0], []).append(
                _operation_html(method, path, operation)
            )
    sections = [f"<h2>{escape(tag)}</h2>{''.join(items)}" for tag, items in groups.items()]
    schemas = [_schema_html(name, schema) for name, schema in spec["components"]["schemas"].items()]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>{title}</h1><p>{escape(spec['info']['description'])}</p>"
        f'<p>As data: <a href="/openapi.json">/openapi.json</a></p>'
        f"{''.join(sections)}<h2>Schemas</h2>{''.join(schemas)}</body></html>"
    )


def _operation_html(method: str, path: str, operation: dict[str, Any]) -> str:
    query = [
        f"<li><code>{escape(parameter['name'])}</code> {escape(parameter['description'])}</li>"
        for parameter in operation.get("parameters", ())
        if parameter.get("in") == "query"
    ]
    responses = [
        f"<li><code>{escape(status)}</code> {escape(_response_text(response))}</li>"
        for status, response in operation["responses"].items()
    ]
    body = _names(operation.get("requestBody", {}).get("content", {}))
    return (
        f"<details><summary><b>{escape(method.upper())}</b> <code>{escape(path)}</code> "
        f"<span>{escape(operation['summary'])}</span></summary>"
        + (f"<p>Body: {escape(body)}</p>" if body else "")
        + (f"<p>Query</p><ul>{''.join(query)}</ul>" if query else "")
        + f"<p>Responses</p><ul>{''.join(responses)}</ul></details>"
    )


def _response_text(response: dict[str, Any]) -> str:
    names = _names(response.get("content", {}))
    return f"{response['description']} {names}".strip()


def _names(content: dict[str, Any]) -> str:
    references = [media["schema"].get("$ref", "") for media in content.values()]
    return ", ".join(reference.rpartition("/")[2] for reference in references if reference)


def _schema_html(name: str, schema: dict[str, Any]) -> str:
    text = msgspec.json.format(msgspec.json.encode(schema), indent=2).decode()
    return (
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code> '
        f"<span>{escape(schema.get('description', ''))}</span></summary>"
        f"<pre>{escape(text)}</pre></details>"
    )
