"""Listings for the documents that are made from the source: modules, log lines, metrics, commands,
and the parts of the simulator."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import click
import trio
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from conveyor.cli.main import cli
from conveyor.cli.mcp.tools import Tools, make_server
from conveyor.cli.scrape.command import scrape
from conveyor.domain import queries
from conveyor.ports import (
    blobs,
    cache,
    clock,
    coordinator,
    executor,
    gateway,
    queue,
    secret_box,
    store,
    webhook_sender,
)
from conveyor.simulation import checkers
from conveyor.simulation.faults.faults import ONLY_ON, Fault
from conveyor.simulation.profiles import CLIENT_PROFILES
from conveyor.telemetry import ActorFigures, ActorUsage, EngineUsage, FetchMetrics, make_metrics
from tests.mutants.defects import MUTANTS
from tests.tidy import doc_comments
from tests.tidy.sources import CODE, Module, modules
from tests.tidy.tables import code, table

PORTS: tuple[type, ...] = (
    store.Store,
    queue.Queue,
    blobs.Blobs,
    coordinator.Coordinator,
    gateway.Gateway,
    webhook_sender.WebhookSender,
    webhook_sender.WorkflowCallback,
    coordinator.Signals,
    cache.Cache,
    secret_box.SecretBox,
    clock.Clock,
    executor.Executor,
)
_REFERENCE = re.compile(r" ?\((?:SPEC|docs/)[^()]*\)")
_LEVELS = ("debug", "info", "warning", "error", "exception", "critical")


def metrics() -> str:
    """Every metric of a process, then those that an engine on AWS adds."""
    entries = [
        (family.name, family.type, collector._labelnames, family.documentation)
        for collector in _collectors(make_metrics(CollectorRegistry()))
        if not isinstance(collector, ActorUsage | FetchMetrics)
        for family in collector.describe()
    ]
    fetches = FetchMetrics()
    fetches.count("2xx", duration_s=0.1, body_bytes=1)
    actors = ActorUsage()
    actors.watch(lambda: [ActorFigures("sample", 1, 1, 1)])
    entries += [
        (family.name, family.type, _labels_of(family), family.documentation)
        for family in (
            *fetches.collect(),
            *actors.collect(),
            *EngineUsage(SampleUsage(), {"sample": 1}).collect(),
        )
    ]
    return table(
        ("metric", "type", "labels", "meaning"),
        (
            (code(name + _suffix(kind)), kind, ", ".join(map(code, labels)), words)
            for name, kind, labels, words in entries
        ),
    )


def _collectors(group: Any) -> Iterator[Any]:
    """The collectors of a group of metrics and of the groups within it."""
    for name in (entry.name for entry in fields(group) if entry.name != "registry"):
        member = getattr(group, name)
        if is_dataclass(member):
            yield from _collectors(member)
        else:
            yield member


@dataclass(frozen=True)
class SampleUsage:
    """Sample usage of an engine, so that every metric family has a label."""

    calls: Mapping[str, int] = field(default_factory=lambda: {"sample": 1})
    failures: Mapping[str, int] = field(default_factory=lambda: {"sample": 1})
    retries: Mapping[str, int] = field(default_factory=lambda: {"sample": 1})
    read_units: float = 1
    write_units: float = 1
    rows_read: int = 1
    rows_returned: int = 1
    price_millionths: float = 1


def _labels_of(family: Metric) -> tuple[str, ...]:
    """The labels of a family that has samples; `le` belongs to every histogram."""
    return tuple(label for label in family.samples[0].labels if label != "le")


def _suffix(kind: str) -> str:
    return "_total" if kind == "counter" else ""


def log_lines() -> str:
    """Every statement that logs in the product, by its level and message."""
    entries = sorted({line for module in _product() for line in _log_calls(module)})
    return table(
        ("level", "message", "fields", "module"),
        (
            (level, code(message), ", ".join(map(code, names)), code(name))
            for level, message, names, name in entries
        ),
    )


def _product() -> Iterator[Module]:
    for module in modules(*CODE):
        if not module.name.startswith("conveyor/simulation/"):
            yield module


def _log_calls(module: Module) -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    for node in ast.walk(module.tree):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="log"), attr=level),
                args=[ast.Constant(value=str(message)), *_],
                keywords=keywords,
            ) if level in _LEVELS:
                names = tuple(
                    key.value
                    for keyword in keywords
                    if keyword.arg == "extra" and isinstance(keyword.value, ast.Dict)
                    for key in keyword.value.keys
                    if isinstance(key, ast.Constant) and isinstance(key.value, str)
                )
                shown_level = "error" if level == "exception" else level
                yield shown_level, message, names, module.name


def commands() -> str:
    """Every command of the program, with the first sentence of its help."""
    return table(("command", "what it does"), _commands(cli, "conveyor"))


def _commands(group: click.Group, path: str) -> Iterator[tuple[str, str]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if not command.hidden:
            yield code(f"{path} {name}"), command.get_short_help_str(limit=200)
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path} {name}")


def mcp_tools() -> str:
    """The tools of `conveyor mcp`, with the texts that an agent gets."""
    rows = []
    for tool in trio.run(make_server(Tools("", None)).list_tools):
        arguments = [
            f"{code(name)}: {schema['description']}" if "description" in schema else code(name)
            for name, schema in tool.input_schema["properties"].items()
        ]
        description = " ".join((tool.description or "").split())
        rows.append((code(tool.name), description, "<br>".join(arguments)))
    return table(("tool", "description", "arguments"), rows)


def scrape_options() -> str:
    """The options of `conveyor scrape` as --help shows them."""
    with click.Context(scrape) as ctx:
        records = [param.get_help_record(ctx) for param in scrape.params]
    rows = [(code(record[0]), record[1]) for record in records if record is not None]
    return table(("option", "meaning"), rows)


def packages() -> str:
    """Every package of the product: the sentence that opens it, and its modules."""
    entries: dict[str, tuple[str, list[str]]] = {}
    for module in modules(*CODE):
        folder, _, file = module.name.rpartition("/")
        _, names = entries.setdefault(folder, ("", []))
        if file == "__init__.py":
            entries[folder] = (first_sentence(module), names)
        else:
            names.append(file.removesuffix(".py"))
    return table(
        ("package", "what it is", "modules"),
        (
            (code(f"{folder}/"), words, ", ".join(map(code, names)))
            for folder, (words, names) in sorted(entries.items())
        ),
    )


def first_sentence(module: Module) -> str:
    paragraph = (ast.get_docstring(module.tree) or "").partition("\n\n")[0]
    text = _REFERENCE.sub("", " ".join(paragraph.split()))
    return text.partition(". ")[0].rstrip(".") + "."


def query_table() -> str:
    return table(
        ("query", "result"),
        (
            (code(name), " ".join((inspect.getdoc(kind) or "").split()))
            for name, kind in vars(queries).items()
            if inspect.isclass(kind)
            and kind is not queries.Query
            and issubclass(kind, queries.Query)
        ),
    )


def laws() -> str:
    """The laws of each port, from its docstring."""
    return "\n\n".join(f"### {port.__name__}\n\n{_law_of(port)}" for port in PORTS)


def _law_of(port: type) -> str:
    methods = ", ".join(
        code(name)
        for name, member in vars(port).items()
        if inspect.isfunction(member) and not name.startswith("_")
    )
    words = (inspect.getdoc(port) or "").removeprefix("Laws:").strip()
    return f"Methods: {methods}.\n\n{words}"


def faults() -> str:
    """Every fault of the simulator, what happens, and the engines that can have it."""
    words = doc_comments.of_class(Fault)
    return table(
        ("fault", "what happens", "engines"),
        (
            (code(fault), words[fault.name], ", ".join(sorted(ONLY_ON.get(fault, ("all",)))))
            for fault in Fault
        ),
    )


def profiles() -> str:
    return table(
        ("profile", "what its clients do more often"),
        (
            (code(name), ", ".join(f"{code(action)} x{times}" for action, times in more.items()))
            for name, more in CLIENT_PROFILES.items()
        ),
    )


def mutants() -> str:
    return table(
        ("mutant", "invariants", "engines", "defect"),
        (
            (
                code(mutant.name),
                ", ".join(f"I{number}" for number in mutant.invariants),
                ", ".join(mutant.engines) or "all",
                mutant.what,
            )
            for mutant in MUTANTS.values()
        ),
    )


def checker_table() -> str:
    """Each invariant with the functions that check it."""
    entries: dict[int, list[str]] = {}
    for number, name in checked():
        entries.setdefault(number, []).append(name)
    return table(
        ("invariant", "checkers"),
        ((f"I{number}", ", ".join(map(code, names))) for number, names in sorted(entries.items())),
    )


def checked() -> Iterator[tuple[int, str]]:
    """Every checker with each number that its docstring begins with."""
    entries: dict[tuple[int, str], None] = {}
    for group in fields(checkers.ALL):
        for checker in getattr(checkers.ALL, group.name):
            module = checker.__module__.rpartition(".")[2]
            words = inspect.getdoc(checker) or ""
            for number in re.findall(r"I(\d+)", words.partition(":")[0]):
                entries[int(number), f"{module}.{checker.__name__}"] = None
    yield from entries
