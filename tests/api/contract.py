"""The public contract as a judge of our answers, where its file is at hand.

It is older than the `zenrows` package, which wins: `nullable` means null is fine, and the words of
open enums are not closed. `times_of_day` may have any minute here.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

CONTRACT = Path(__file__).parents[3] / "shared" / "contract" / "batch-v1.openapi.yaml"


@cache
def load() -> dict[str, Any] | None:
    if not CONTRACT.exists():
        return None
    document: dict[str, Any] = yaml.safe_load(CONTRACT.read_text())
    problem = document["components"]["schemas"]["Problem"]
    del problem["properties"]["invalid_tasks"]["items"]["properties"]["reason"]["enum"]
    del document["components"]["schemas"]["Run"]["properties"]["failure_reason"]["enum"]
    calendar = document["components"]["schemas"]["ScheduleCalendar"]
    del calendar["properties"]["times_of_day"]["items"]["pattern"]
    del document["components"]["schemas"]["TaskStatus"]["enum"]
    _allow_null(document)
    return document


def _allow_null(node: Any) -> None:
    if isinstance(node, dict):
        if node.get("nullable") is True and isinstance(node.get("type"), str):
            node["type"] = [node["type"], "null"]
        for child in node.values():
            _allow_null(child)
    elif isinstance(node, list):
        for child in node:
            _allow_null(child)


def _operation(method: str, path: str) -> dict[str, Any] | None:
    document = load()
    assert document is not None
    for template, methods in document["paths"].items():
        pattern = re.sub(r"\{\w+\}", "[^/]+", template)
        if re.fullmatch(pattern, path.removeprefix("/v1")) and method.lower() in methods:
            operation: dict[str, Any] = methods[method.lower()]
            return operation
    return None


def check(method: str, path: str, status: int, media_type: str, body: Any) -> None:
    """Fails unless the contract allows this body for this answer of this operation."""
    document = load()
    if document is None:
        return
    if status >= 400:
        schema: dict[str, Any] = {"$ref": "#/components/schemas/Problem"}
    else:
        operation = _operation(method, path)
        if operation is None:
            return
        answer = operation["responses"].get(str(status))
        assert answer is not None, f"{method} {path} may not answer {status}"
        if media_type != "application/json" or "content" not in answer:
            return
        schema = answer["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(body)
