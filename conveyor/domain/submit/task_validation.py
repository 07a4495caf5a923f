"""Which lines of a list are tasks, and what is wrong with those that are not
(docs/api.md, Submitting lists)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from conveyor.domain import limits
from conveyor.domain.errors import InvalidTask
from conveyor.domain.model import Method, Problem, TaskSpec
from conveyor.domain.problems import make_problem
from conveyor.domain.submit.scraper_params import (
    NOT_WITH_POST,
    InvalidParam,
    ParamInput,
    check_params,
)
from conveyor.domain.submit.ssrf import TargetPolicy
from conveyor.domain.submit.url import BadUrl, parse_url

T = TypeVar("T")

EXTERNAL_ID_PATTERN = f"^[A-Za-z0-9._-]{{1,{limits.EXTERNAL_ID_CHARS_MAX}}}$"

# Matched as a whole: in Python `$` also matches before a last line break.
_EXTERNAL_ID = re.compile(EXTERNAL_ID_PATTERN)
_FORM = "application/x-www-form-urlencoded"


class TaskDraft(msgspec.Struct, frozen=True, kw_only=True):
    """One line as a caller wrote it; `flaw` when it could not even be read."""

    url: object
    external_id: object = None
    metadata: object = None
    method: object = None
    body: msgspec.Raw | None = None
    params: object = None
    flaw: str | None = None


class Secrets(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a task or job carries that must be sealed before it is stored."""

    headers: dict[str, str] | None = None
    body: bytes | None = None
    content_type: str | None = None


class Refusal(Exception):
    """This line is no task; the contract's reason, and a shortened look at what is wrong."""

    def __init__(self, reason: str, value: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.value = value


def check_task(
    index: int, draft: TaskDraft, job_params: Mapping[str, str], targets: TargetPolicy | None
) -> tuple[TaskSpec, Secrets | None]:
    """One good line, with its secrets apart; Refusal for a bad one.

    `targets` is what we may reach ourselves; None when a gateway elsewhere does the fetching.
    """
    if draft.flaw is not None:
        raise Refusal(draft.flaw)
    url = _check_url(draft.url, targets)
    params, headers = _check_task_params(draft.params)
    method = Method.GET
    if draft.method is not None:
        method = _check_method(draft.method, {**job_params, **(params or {})})
    body, content_type = _check_body(draft.body, method)
    spec = TaskSpec(
        index=index,
        url=url,
        method=method,
        external_id=_check_external_id(draft.external_id),
        metadata=check_metadata(draft.metadata),
        params=params,
    )
    secrets = None
    if headers is not None or body is not None:
        secrets = Secrets(headers=headers, body=body, content_type=content_type)
    _check_size(spec, headers, body)
    return spec, secrets


def _check_size(spec: TaskSpec, headers: dict[str, str] | None, body: bytes | None) -> None:
    """Engines write many tasks in one transaction, and a transaction has its limits."""
    brought = sum(_bytes_of(each) for each in (spec.metadata, spec.params, headers) if each)
    if brought + len(body or b"") + len(spec.url.encode()) > limits.TASK_BYTES_MAX:
        raise Refusal("task_too_large")


def _bytes_of(given: Mapping[str, str]) -> int:
    return sum(len(key.encode()) + len(value.encode()) for key, value in given.items())


def invalid_task(index: int, refusal: Refusal) -> InvalidTask:
    return InvalidTask(index=index, reason=refusal.reason, value=refusal.value)


def refused_task(
    index: int, draft: TaskDraft, refusal: Refusal, targets: TargetPolicy | None
) -> TaskSpec:
    """A bad line as the failed task it becomes, with whatever of it is fit to be kept."""
    url = _if_good(lambda: _check_url(draft.url, targets))
    return TaskSpec(
        index=index,
        url=url or (_shortened(draft.url) if isinstance(draft.url, str) else ""),
        external_id=_if_good(lambda: _check_external_id(draft.external_id)),
        metadata=_if_good(lambda: check_metadata(draft.metadata)),
        problem=_problem_of(refusal),
    )


def _if_good(check: Callable[[], T]) -> T | None:
    try:
        return check()
    except Refusal:
        return None


def _problem_of(refusal: Refusal) -> Problem:
    detail = f"It was refused: {refusal.reason}"
    detail += f", {refusal.value}." if refusal.value else "."
    storable = detail.encode(errors="replace").decode()
    return make_problem(refusal.reason, "The line is no valid task", 400, storable)


def _check_url(url: object, targets: TargetPolicy | None) -> str:
    if not isinstance(url, str):
        raise Refusal("malformed_url")
    target = parse_url(url)
    if isinstance(target, BadUrl):
        raise Refusal(target.reason, _shortened(url))
    if targets is not None and targets.forbids_target(target) is not None:
        raise Refusal("forbidden_target", _shortened(url))
    return url


def _shortened(url: str) -> str:
    """Enough of a bad URL to find it; no query, where tokens live, and nothing unprintable."""
    head = url[:100].partition("?")[0]
    if "@" in url.partition("?")[0]:
        head = head.partition("://")[0]
    head = head.encode("ascii", errors="backslashreplace").decode()
    return "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in head)


def _check_task_params(given: object) -> tuple[dict[str, str] | None, dict[str, str] | None]:
    if given is None:
        return None, None
    if not isinstance(given, dict):
        raise Refusal("invalid_param_value", "zenrows_params")
    params: ParamInput = given
    try:
        checked = check_params(params)
    except InvalidParam as error:
        raise Refusal(error.reason, error.key[:64]) from error
    return checked.values or None, checked.headers


def _check_method(given: object, params: Mapping[str, str]) -> Method:
    name = given.upper() if isinstance(given, str) else ""
    if name not in Method.__members__:
        raise Refusal("unsupported_method", str(given)[:20])
    method = Method(name)
    clash = sorted(NOT_WITH_POST & params.keys())
    if method is Method.POST and clash:
        raise Refusal("method_param_conflict", clash[0])
    return method


def _check_body(raw: msgspec.Raw | None, method: Method) -> tuple[bytes | None, str | None]:
    if raw is None or bytes(raw) == b"null":
        return None, None
    if method is not Method.POST:
        raise Refusal("body_not_allowed")
    if len(bytes(raw)) > limits.TASK_BODY_BYTES_MAX:
        raise Refusal("body_too_large")
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Refusal("body_malformed") from None
    if isinstance(value, str):
        return value.encode(errors="replace"), _FORM
    return bytes(raw), "application/json"


def _check_external_id(given: object) -> str | None:
    if given is None:
        return None
    if not isinstance(given, str) or _EXTERNAL_ID.fullmatch(given) is None:
        raise Refusal("invalid_external_id", str(given)[:64])
    return given


def check_metadata(given: object) -> dict[str, str] | None:
    if given is None:
        return None
    if not isinstance(given, dict) or len(given) > limits.METADATA_KEYS_MAX:
        raise Refusal("metadata_too_large")
    for key, value in given.items():
        if not key or len(key) > limits.METADATA_KEY_CHARS_MAX or not key.isprintable():
            raise Refusal("metadata_key_invalid", key[:64])
        if not isinstance(value, str) or len(value) > limits.METADATA_VALUE_CHARS_MAX:
            raise Refusal("metadata_too_large", key[:64])
        if not _is_storable(value) or not _is_storable(key):
            raise Refusal("metadata_key_invalid", key[:64].encode(errors="replace").decode())
    if _bytes_of(given) > limits.METADATA_BYTES_MAX:
        raise Refusal("metadata_too_large")
    return given or None


def _is_storable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
