"""Renders the OpenAPI document as a page (docs/api.md).

The page is complete without scripts. docs.js adds forms that send requests. Everything comes from
this server: the Content-Security-Policy allows nothing else.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

_FILES = Path(__file__).with_name("docs")
MEDIA_TYPES = {
    "docs.css": "text/css; charset=utf-8",
    "docs.js": "text/javascript; charset=utf-8",
    "docs.svg": "image/svg+xml",
}
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; object-src 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}
_CODE = re.compile(r"`([^`]+)`")


def render_page(document: bytes, *, base_url: str) -> str:
    """Renders every operation, error and schema of an OpenAPI document."""
    spec: dict[str, Any] = msgspec.json.decode(document)
    operations: dict[str, list[tuple[str, str, Any]]] = {}
    for path, methods in spec["paths"].items():
        for method, operation in methods.items():
            operations.setdefault(operation["tags"][0], []).append(
                (method.upper(), path, operation)
            )
    components = spec["components"]
    return (
        _environment()
        .get_template("docs.html")
        .render(
            info=spec["info"],
            tags=spec["tags"],
            operations=operations,
            schemes=components["securitySchemes"],
            errors=components["responses"],
            schemas=components["schemas"],
            base_url=base_url,
        )
    )


@cache
def read_file(name: str) -> bytes:
    """Returns the style sheet, the script or the icon of the page."""
    return (_FILES / name).read_bytes()


def make_environment(templates: Path) -> Environment:
    """Returns an environment that escapes every value and refuses undefined names. The dashboard
    has its own templates in another one."""
    return Environment(
        loader=FileSystemLoader(templates),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )


@cache
def _environment() -> Environment:
    environment = make_environment(_FILES)
    environment.filters |= {
        "access": _access,
        "curl": _curl,
        "json": lambda value: json.dumps(value, indent=2, ensure_ascii=False),
        "phrase": lambda status: HTTPStatus(int(status)).phrase,
        "prose": _prose,
        "type": _type,
    }
    return environment


def _prose(text: str) -> Markup:
    """Formats the words of a description: code between backticks, and a list after a blank line."""
    head, _, items = text.partition("\n\n")
    formatted = _inline(head)
    if not items:
        return formatted
    rows = [_inline(line.removeprefix("- ")) for line in items.splitlines()]
    lines = Markup("").join(Markup("<li>{}</li>").format(row) for row in rows)
    return Markup("{}<ul>{}</ul>").format(formatted, lines)


def _inline(text: str) -> Markup:
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))  # noqa: S704 (escaped)


def _access(operation: Mapping[str, Any]) -> str:
    ways = operation["security"]
    if {} not in ways:
        return "API key"
    return "API key, or the token of a link" if len(ways) > 1 else "none"


def _type(schema: Mapping[str, Any]) -> Markup:
    """Describes the type of a value, with links to the schemas that it names."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return Markup('<a href="#schema-{0}">{0}</a>').format(name)
    for union in ("anyOf", "oneOf", "allOf"):
        if union in schema:
            return Markup(" or ").join(_type(choice) for choice in schema[union])
    if "enum" in schema:
        return Markup(", ").join(Markup("<code>{}</code>").format(v) for v in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        return Markup("list of {}").format(_type(schema.get("items", {})))
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return Markup("object of {}").format(_type(schema["additionalProperties"]))
    name = " or ".join(kind) if isinstance(kind, list) else kind
    details = [schema[key] for key in ("format",) if key in schema]
    details += [
        f"{word} {schema[key]}"
        for key, word in (("minimum", "at least"), ("maximum", "at most"), ("maxLength", "up to"))
        if key in schema
    ]
    return escape(f"{name} ({', '.join(details)})" if details else name)


def _curl(operation: Mapping[str, Any], method: str, path: str) -> str:
    """Writes the example of an operation as a command."""
    query = {}
    for parameter in operation["parameters"]:
        if parameter["in"] == "path":
            path = path.replace(f"{{{parameter['name']}}}", parameter["example"])
        elif "example" in parameter:
            query[parameter["name"]] = parameter["example"]
    target = f"{path}?{urlencode(query)}" if query else path
    words = ["curl"] if method == "GET" else ["curl", "-X", method]
    words.append(shlex.quote(f"$CONVEYOR{target}").replace("'", '"'))
    if {} not in operation["security"] or len(operation["security"]) > 1:
        words += ["-H", '"X-API-Key: $KEY"']
    for kind, media in operation.get("requestBody", {"content": {}})["content"].items():
        example = media["example"]
        text = example if isinstance(example, str) else json.dumps(example)
        flag = "--data-binary" if isinstance(example, str) else "-d"
        if kind != "*/*":
            words += ["-H", shlex.quote(f"Content-Type: {kind}")]
        words += [flag, shlex.quote(text)]
    return " ".join(words)
