"""Tables for the documents that are made from values: rows, limits, settings, codes, diagrams."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from conveyor import config
from conveyor.api.server.app import ROUTES
from conveyor.domain import budget, crawl_record, export_record, lifecycle, limits, model, schedule
from conveyor.domain import quota as quotas
from conveyor.domain.changes import ROW_KINDS, Row
from conveyor.domain.run import wait_reason
from conveyor.domain.run.settlement import BACKOFF
from conveyor.domain.submit.conditions import CONDITIONS
from conveyor.domain.submit.scraper_params import DIRECT_PARAMS, OWN_PARAMS, PARAMS
from conveyor.schemas import requests
from conveyor.schemas.problem_codes import PROBLEM_CODES
from conveyor.ui.words import WAITS
from tests.tidy import doc_comments
from tests.tidy.sources import modules

DIAGRAMS: Mapping[str, lifecycle.Table[Any, Any]] = {
    "Job": lifecycle.JOB,
    "Run": lifecycle.RUN,
    "Task": lifecycle.TASK,
    "Batch": lifecycle.BATCH,
    "Counter state": lifecycle.COUNTERS,
    "Webhook event": lifecycle.NOTICE,
    "Schedule": lifecycle.SCHEDULE,
    "Export": lifecycle.EXPORT,
    "Crawl": lifecycle.CRAWL,
}
ROWS: tuple[type[msgspec.Struct], ...] = Row.__args__
# Structs that are stored within rows, staged lists and messages.
VALUES: tuple[type[msgspec.Struct], ...] = (
    model.TaskSpec,
    model.TaskRef,
    model.Result,
    model.Attempt,
    model.Problem,
    model.Webhook,
    model.StagedList,
    model.RowsOf,
    model.UploadedList,
    model.ListSpec,
    model.SigningKey,
    model.DeliveryAttempt,
    schedule.At,
    schedule.Rate,
    schedule.Calendar,
    schedule.Cron,
    schedule.Skip,
    budget.BudgetCap,
    model.HostLimits,
    model.HostLimit,
    export_record.Manifest,
    crawl_record.CrawlRules,
    crawl_record.CrawlEntry,
)


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table; a bar within a cell is escaped."""
    heads = list(header)
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def code(text: object) -> str:
    return f"`{text}`"


def diagrams() -> str:
    """Every state machine as the diagram that its table generates."""
    return "\n\n".join(
        f"{name}:\n\n```mermaid\n{lifecycle.mermaid(rules)}\n```"
        for name, rules in DIAGRAMS.items()
    )


def transitions() -> str:
    """Every state machine with its events, as `event: sources → target`."""
    return table(
        ("state machine", "events"),
        (
            (
                name,
                "; ".join(
                    f"{event}: {', '.join(sorted(starts))} → {end}"
                    for event, (starts, end) in rules.items()
                ),
            )
            for name, rules in DIAGRAMS.items()
        ),
    )


def row_kinds() -> str:
    header = (
        "row",
        "key",
        "belongs to",
        "SQLite table",
        "name in DynamoDB",
        "removed when expired by",
    )
    return table(
        header,
        (
            (
                code(kind.row_type.__name__),
                ", ".join(map(code, kind.key_fields)),
                kind.owner.value,
                code(kind.table),
                code(kind.name),
                kind.expiry.value if kind.expiry else "",
            )
            for kind in ROW_KINDS
        ),
    )


def rows() -> str:
    return "\n\n".join(map(_struct, ROWS))


def values() -> str:
    return "\n\n".join(map(_struct, VALUES))


def _struct(kind: type[msgspec.Struct]) -> str:
    words = doc_comments.of_class(kind)
    assert list(words) == list(kind.__struct_fields__), kind
    types = kind.__annotations__
    fields = (
        (code(name), code(_plain_type(types[name])), _default(kind, name), text)
        for name, text in words.items()
    )
    return f"### {kind.__name__}\n\n" + table(("field", "type", "default", "meaning"), fields)


def job_fields() -> str:
    return _request_fields(requests.SubmitJobRequest)


def task_fields() -> str:
    return _request_fields(requests.TaskInput)


def _request_fields(kind: type[msgspec.Struct]) -> str:
    words = doc_comments.of_class(kind)
    assert list(words) == list(kind.__struct_fields__), kind
    defaults = {field.name: field.default for field in msgspec.structs.fields(kind)}
    return table(
        ("field", "default", "meaning"),
        ((code(name), _json_default(defaults[name]), text) for name, text in words.items()),
    )


def _json_default(value: object) -> str:
    return "" if value in {None, msgspec.UNSET} else code(msgspec.json.encode(value).decode())


def _plain_type(annotation: object) -> str:
    return str(annotation).replace(" | None", "?")


def _default(kind: type[msgspec.Struct], name: str) -> str:
    info = next(field for field in msgspec.structs.fields(kind) if field.name == name)
    if info.required:
        return ""
    if info.default is msgspec.NODEFAULT:
        return code("{}")
    if info.default is None:
        return "absent"
    return code(info.default if info.default != "" else '""')


def limits_table() -> str:
    words = doc_comments.of_module(limits)
    return table(
        ("limit", "value", "meaning"),
        ((code(name), _number(vars(limits)[name]), text) for name, text in words.items()),
    )


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def settings() -> str:
    """Each variable with its default and its values, from the calls that read the environment."""
    words = doc_comments.of_class(config.Settings, without={"quotas", "postgres", "gateway"})
    words |= doc_comments.of_class(config.PostgresSettings)
    words |= doc_comments.of_class(config.GatewaySettings)
    read = _variables_read()
    found = [
        (code(variable), default, allowed, words[field])
        for field, (variable, default, allowed) in read.items()
    ]
    quota_words = doc_comments.of_class(quotas.Quota)
    for variable, quota in config.QUOTAS.items():
        default = code(quotas.DEFAULTS[quota])
        text = f"Quota: {quota_words[quota.name]}"
        found.append((code(variable), default, "a number; `off` or 0 lifts it", text))
    return table(("variable", "default", "values", "meaning"), found)


def _variables_read() -> dict[str, tuple[str, str, str]]:
    """By field: its variable, default and values. `read(name, default, parse)` is how most of them
    are read."""
    found: dict[str, tuple[str, str, str]] = {}
    local: dict[str, ast.expr] = {}
    (source,) = (module for module in modules("conveyor") if module.name == "conveyor/config.py")
    body = [
        statement
        for node in source.tree.body
        if isinstance(node, ast.FunctionDef)
        and node.name in {"settings_from", "_postgres_settings", "_gateway_settings"}
        for statement in node.body
    ]
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                local[name] = value
            case ast.Return(value=ast.Call(keywords=keywords)):
                for keyword in keywords:
                    assert keyword.arg is not None
                    value = keyword.value
                    if isinstance(value, ast.Name):
                        value = local[value.id]
                    if keyword.arg not in {"quotas", "postgres", "gateway"}:
                        found[keyword.arg] = _variable(value)
    return found


def _variable(value: ast.expr) -> tuple[str, str, str]:
    text = ast.unparse(value)
    (name,) = set(re.findall(r"CONVEYOR_[A-Z_]+", text)) or {config.KEYS_FILE}
    for node in ast.walk(value):
        match node:
            case ast.Call(func=ast.Name(id="read"), args=[_, default, parse]):
                shown = str(_evaluate(default))
                return name, code(shown) if shown else "", _allowed_values(parse)
    return name, "", ""


def _evaluate(node: ast.expr) -> object:
    return eval(ast.unparse(node), {"limits": limits, "str": str})


def _allowed_values(parse: ast.expr) -> str:
    match parse:
        case ast.Call(func=ast.Name(id="_between" | "_between_if_given"), args=[least, most]):
            return f"{_evaluate(least)} to {_evaluate(most)}"
        case ast.Call(func=ast.Name(id="_one_of"), args=choices):
            return ", ".join(code(_evaluate(choice)) for choice in choices if _evaluate(choice))
        case ast.Name(id="_switch"):
            return "`on`, `off`"
        case _:
            return ""


def quota_table() -> str:
    words = doc_comments.of_class(quotas.Quota)
    variables = {quota: variable for variable, quota in config.QUOTAS.items()}
    return table(
        ("quota", "default", "setting", "what is counted"),
        (
            (code(quota), quotas.DEFAULTS[quota], code(variables[quota]), words[quota.name])
            for quota in quotas.Quota
        ),
    )


def wait_reasons() -> str:
    words = doc_comments.of_class(wait_reason.WaitReason)
    return table(
        ("reason", "meaning"),
        ((code(reason), words[reason.name]) for reason in wait_reason.WaitReason),
    )


def failure_reasons() -> str:
    words = doc_comments.of_class(model.FailureReason)
    return table(
        ("reason", "meaning", "first delay", "longest delay"),
        (
            (
                code(reason),
                words[reason.name],
                f"{BACKOFF[reason].first_s:g} s",
                f"{BACKOFF[reason].delay_s_max:g} s",
            )
            for reason in model.FailureReason
        ),
    )


def run_failures() -> str:
    words = doc_comments.of_class(model.RunFailure)
    return table(
        ("failure reason of a run", "meaning"),
        ((code(reason), words[reason.name]) for reason in model.RunFailure),
    )


def shown_waits() -> str:
    return table(
        ("reason", "title on the page", "what helps"),
        ((code(reason), wait.title, wait.remedy) for reason, wait in WAITS.items()),
    )


def event_types() -> str:
    words = doc_comments.of_class(model.EventType)
    return table(("event", "meaning"), ((code(kind), words[kind.name]) for kind in model.EventType))


def problems() -> str:
    return table(
        ("status", "code", "when"),
        (
            (status, code(name), meaning)
            for status, codes in PROBLEM_CODES.items()
            for name, meaning in codes.items()
        ),
    )


def routes() -> str:
    return table(
        ("operation", "responses", "query", "access", "summary"),
        (
            (
                code(f"{route.method} {route.path}"),
                ", ".join(map(str, route.answers)),
                ", ".join(code(parameter.name) for parameter in route.query),
                route.access.name.lower(),
                route.summary,
            )
            for route in ROUTES
        ),
    )


def params() -> str:
    return table(
        ("parameter", "meaning", "direct fetch", "`conveyor gateway`", "hosted gateway"),
        (
            (
                code(key),
                meaning,
                _honoured(DIRECT_PARAMS, key),
                _honoured(OWN_PARAMS, key),
                _sent_on(key),
            )
            for key, meaning in sorted(PARAMS.items())
        ),
    )


def _honoured(params: Mapping[str, str], key: str) -> str:
    """Returns what a gateway does with a parameter, or with each value of it that it honours."""
    values = {
        name.removeprefix(f"{key}="): words
        for name, words in params.items()
        if name.startswith(f"{key}=")
    }
    words = [params[key]] if key in params else []
    words += [
        text if code(value) in text else f"{code(value)} {text}" for value, text in values.items()
    ]
    return "; ".join(words) or "refused"


def _sent_on(key: str) -> str:
    if key in CONDITIONS:
        return "honoured on the body that the gateway returns"
    return "sent as headers" if key == "custom_headers" else "sent on"
