"""Requests: decodes the bodies that callers send, strictly (docs/api.md, Submitting lists).

Unknown fields are refused with a JSON pointer. The lines of a list are the exception: the fields of
a line may have any type here, and the domain validates each line, so that one invalid line among a
million is reported by its index and does not refuse the whole document.

An object with a repeated key is refused, at every depth, because another parser may use the other
value.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from conveyor.domain import limits
from conveyor.domain.backpressure.budget import BudgetCap, Unit, micros_from
from conveyor.domain.backpressure.host_limit import HostLimit, HostLimits
from conveyor.domain.errors import InvalidArgument
from conveyor.domain.model import ListFormat, ListSpec
from conveyor.domain.submit.admission import EXTERNAL_ID_PATTERN, TaskDraft
from conveyor.domain.submit.scraper_params import PARAMS, RESPONSE_TYPES, find_doubled_key
from conveyor.domain.submit.target import BadUrl, parse_url
from conveyor.schemas.schedule import JobSchedule, UpdateScheduleStateRequest

T = TypeVar("T")

# In Python, `$` also matches before a final line break; `(?!\n)` excludes it. These patterns are
# also in openapi.json, and in other dialects the look-ahead changes nothing.
_EXTERNAL_ID = EXTERNAL_ID_PATTERN + r"(?!\n)"
# Control characters and line separators, which a terminal or a log would interpret.
_NO_CONTROLS = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$(?!\n)"

# Decimal text: a JSON number would become a float and lose digits. `$(?!\n)` is explained above.
_MONEY = r"^[0-9]{1,9}(\.[0-9]{1,6})?$(?!\n)"

Concurrency = Annotated[
    int,
    Meta(ge=1, le=limits.MAX_INFLIGHT_MAX, description="Fetches of one host at the same time."),
]
Rate = Annotated[
    float,
    Meta(
        ge=limits.HOST_RATE_MIN,
        le=limits.HOST_RATE_MAX,
        description="Fetches of one host that begin in a second.",
    ),
]


class BudgetInput(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The most that each run may spend: either credits, or money as decimal text."""

    credits: Annotated[int, Meta(ge=1, le=limits.BUDGET_CREDITS_MAX)] | None = None
    cost: Annotated[str, Meta(pattern=_MONEY, description="Such as 12.50.")] | None = None


class HostLimitInput(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The limits of one host. An omitted field means no limit."""

    concurrency: Concurrency | None = None
    rate_per_s: Rate | None = None


class HostLimitsInput(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The limits of each host of the job. `hosts` has exceptions for named hosts."""

    concurrency: Concurrency | None = None
    rate_per_s: Rate | None = None
    hosts: Annotated[dict[str, HostLimitInput], Meta(max_length=limits.HOST_OVERRIDES_MAX)] = {}


_PARAM = {"type": ["string", "boolean", "integer"], "maxLength": limits.PARAM_VALUE_CHARS_MAX}
_PARAMS_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        **dict.fromkeys(sorted(PARAMS), _PARAM),
        "custom_headers": {"type": ["object", "string"]},
        "mode": {"type": "string", "enum": ["auto"]},
        "response_type": {"type": "string", "enum": sorted(RESPONSE_TYPES)},
    },
    "additionalProperties": False,
}


class TaskInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of a list: a URL, and optionally how to fetch it."""

    url: Annotated[
        Any,
        Meta(
            description="An http or https URL.",
            extra_json_schema={
                "type": "string",
                "format": "uri",
                "maxLength": limits.URL_CHARS_MAX,
            },
        ),
    ] = None
    external_id: Annotated[
        Any,
        Meta(
            description="The caller's own name for the line; need not be unique.",
            extra_json_schema={"type": "string", "pattern": EXTERNAL_ID_PATTERN},
        ),
    ] = None
    metadata: Annotated[
        Any,
        Meta(
            description="Kept with the task and given back with its result.",
            extra_json_schema={
                "type": "object",
                "maxProperties": limits.METADATA_KEYS_MAX,
                "additionalProperties": {
                    "type": "string",
                    "maxLength": limits.METADATA_VALUE_CHARS_MAX,
                },
            },
        ),
    ] = None
    method: Annotated[
        Any,
        Meta(
            description="A POST may be repeated: use it for requests that are safe to repeat.",
            extra_json_schema={"type": "string", "enum": ["GET", "POST"]},
        ),
    ] = None
    body: (
        Annotated[
            msgspec.Raw,
            Meta(description="With POST only: text is sent as a form, anything else as JSON."),
        ]
        | msgspec.UnsetType
    ) = msgspec.UNSET
    zenrows_params: Annotated[
        Any,
        Meta(
            description="Parameters of this line; they win over those of the job.",
            extra_json_schema=_PARAMS_SCHEMA,
        ),
    ] = None


OnInvalidInput = Annotated[
    Literal["reject", "skip"],
    Meta(
        description="What a bad line does: refuse the list, or become a task that has failed. "
        "In an uploaded list it always becomes one."
    ),
]
ColumnInput = Annotated[int, Meta(ge=0, le=100_000)] | Annotated[str, Meta(min_length=1)]


class WebhookInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The URL that is called at the end of a run, and whether calls are signed."""

    url: Annotated[str, Meta(max_length=limits.URL_CHARS_MAX)]
    signature: bool = False


class WebhookConfigInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A complete webhook. It replaces the previous one, so every field is required."""

    url: Annotated[str, Meta(max_length=limits.URL_CHARS_MAX)]
    signature: bool


class SubmitJobRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job: its list, the settings for all lines, and its webhook."""

    type: Literal["regular", "scheduled"] = "regular"
    status: Annotated[
        Literal["open", "closed"],
        Meta(description="An open job takes more tasks until it is closed."),
    ] = "closed"
    tasks: Annotated[list[TaskInput], Meta(max_length=limits.TASKS_MAX)] | None = None
    zenrows_params: Annotated[dict[str, Any], Meta(extra_json_schema=_PARAMS_SCHEMA)] | None = None
    external_id: Annotated[str, Meta(pattern=_EXTERNAL_ID)] | None = None
    name: Annotated[str, Meta(max_length=limits.NAME_CHARS_MAX, pattern=_NO_CONTROLS)] | None = None
    metadata: dict[str, Any] | None = None
    webhook: WebhookInput | None = None
    file_input_id: str | None = None
    schedule: (
        Annotated[JobSchedule, Meta(description="With type `scheduled`, and only there.")] | None
    ) = None
    on_invalid: OnInvalidInput = "reject"
    max_inflight: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=limits.MAX_INFLIGHT_MAX,
                description="How many tasks of the job may be fetched at the same time.",
            ),
        ]
        | None
    ) = None
    max_attempts: (
        Annotated[
            int,
            Meta(ge=1, le=limits.MAX_ATTEMPTS_MAX, description="Tries a task has before it fails."),
        ]
        | None
    ) = None
    priority: Annotated[
        int,
        Meta(ge=1, le=limits.PRIORITY_MAX, description="The job's weight among the caller's jobs."),
    ] = 1
    result_ttl_days: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=limits.RESULT_TTL_DAYS_MAX,
                description="How many days results are kept after their run has ended: "
                f"{limits.RESULT_TTL_DAYS} if it is not said. A server keeps no body for more than "
                f"so many days ({limits.BODY_DAYS}, if it was not set otherwise) after it was "
                "fetched, and takes no larger number.",
            ),
        ]
        | None
    ) = None
    budget: BudgetInput | None = None
    host_limits: HostLimitsInput | None = None
    sfn_task_token: (
        Annotated[
            str,
            Meta(
                pattern=rf"^[!-~]{{1,{limits.TASK_TOKEN_CHARS_MAX}}}$(?!\n)",
                description="The token of a Step Functions task that waits for the first run.",
            ),
        ]
        | None
    ) = None


class AddTasksRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A further list for an open job."""

    tasks: Annotated[list[TaskInput], Meta(max_length=limits.TASKS_MAX)]
    last_batch: Annotated[bool, Meta(description="Closes the job behind this list.")] = False
    on_invalid: OnInvalidInput = "reject"


class CsvFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The columns that contain the fields of a task."""

    url: ColumnInput
    external_id: ColumnInput | None = None


class CsvInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The columns and the dialect of a CSV file."""

    fields: CsvFields
    delimiter: Annotated[str, Meta(min_length=1, max_length=1)] | None = None
    quote: Annotated[str, Meta(min_length=1, max_length=1)] | None = None
    header: Annotated[bool, Meta(description="The first row names the columns.")] | None = None


class CreateJobInputRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A slot for a list, and the format of the list."""

    type: Literal["csv"] = "csv"
    format: (
        Annotated[
            Literal["csv", "ndjson", "text"],
            Meta(description="`ndjson`: a task a line, as in `tasks`; `text`: a URL a line."),
        ]
        | None
    ) = None
    csv: CsvInput | None = None


_SUBMIT = msgspec.json.Decoder(SubmitJobRequest)
_ADD_TASKS = msgspec.json.Decoder(AddTasksRequest)
_WEBHOOK_CONFIG = msgspec.json.Decoder(WebhookConfigInput)
_TEST_WEBHOOK = msgspec.json.Decoder(WebhookInput)
_SCHEDULE = msgspec.json.Decoder(JobSchedule)
_SCHEDULE_STATE = msgspec.json.Decoder(UpdateScheduleStateRequest)
_CREATE_INPUT = msgspec.json.Decoder(CreateJobInputRequest)
_BUDGET = msgspec.json.Decoder(BudgetInput)
_HOST_LIMITS = msgspec.json.Decoder(HostLimitsInput)


def decode_submit(body: bytes) -> SubmitJobRequest:
    return decode_strictly(_SUBMIT, body)


def decode_add_tasks(body: bytes) -> AddTasksRequest:
    return decode_strictly(_ADD_TASKS, body)


def decode_webhook_config(body: bytes) -> WebhookConfigInput:
    return decode_strictly(_WEBHOOK_CONFIG, body)


def decode_test_webhook(body: bytes) -> WebhookInput:
    return decode_strictly(_TEST_WEBHOOK, body)


def decode_schedule(body: bytes) -> JobSchedule:
    return decode_strictly(_SCHEDULE, body)


def decode_schedule_state(body: bytes) -> UpdateScheduleStateRequest:
    return decode_strictly(_SCHEDULE_STATE, body)


def decode_create_input(body: bytes) -> CreateJobInputRequest:
    return decode_strictly(_CREATE_INPUT, body)


def list_spec_of(request: CreateJobInputRequest) -> ListSpec:
    """Returns the format of the list. Raises InvalidArgument for a contradictory one."""
    list_format = ListFormat(request.format or request.type)
    if list_format is not ListFormat.CSV:
        if request.csv is not None:
            raise InvalidArgument(
                f"csv is only for lists in the csv format, not {list_format}.", pointer="/csv"
            )
        return ListSpec(list_format)
    if request.csv is None:
        raise InvalidArgument("csv.fields must name the column of the URL.", pointer="/csv")
    return _csv_spec_of(request.csv)


def _csv_spec_of(csv: CsvInput) -> ListSpec:
    spec = ListSpec(
        ListFormat.CSV,
        url=csv.fields.url,
        external_id=csv.fields.external_id,
        header=csv.header or False,
        delimiter=csv.delimiter or ",",
        quote=csv.quote or '"',
    )
    for name in ("delimiter", "quote"):
        mark: str = getattr(spec, name)
        if not (mark.isprintable() or mark == "\t"):
            raise InvalidArgument(f"The {name} must be printable.", pointer=f"/csv/{name}")
    if spec.delimiter == spec.quote:
        raise InvalidArgument("delimiter and quote must differ.", pointer="/csv/quote")
    for name in ("url", "external_id"):
        if isinstance(getattr(spec, name), str) and not spec.header:
            raise InvalidArgument(
                "Without a header, a column must be named by its position.",
                pointer=f"/csv/fields/{name}",
            )
    return spec


def decode_budget(body: bytes) -> BudgetInput:
    return decode_strictly(_BUDGET, body)


def decode_host_limits(body: bytes) -> HostLimitsInput:
    return decode_strictly(_HOST_LIMITS, body)


def drafts_of(tasks: list[TaskInput], *, start: int = 0) -> list[TaskDraft]:
    """Returns the lines for the validation by the domain. Only the depth of bodies is checked
    here.
    """
    return [
        TaskDraft(
            url=task.url,
            external_id=task.external_id,
            metadata=task.metadata,
            method=task.method,
            body=None if task.body is msgspec.UNSET else _check_body(index, task.body),
            params=task.zenrows_params,
        )
        for index, task in enumerate(tasks, start)
    ]


def _check_body(index: int, body: msgspec.Raw) -> msgspec.Raw:
    # The domain refuses a longer body for its length, so its depth need not be computed.
    if len(memoryview(body)) <= limits.TASK_BODY_BYTES_MAX and is_too_deep(bytes(body)):
        why = f"it is nested more than {limits.JSON_DEPTH_MAX} deep"
        raise malformed(why, pointer=f"/tasks/{index}/body")
    return body


def decode_strictly(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        decoded = decoder.decode(body)
        doubled = find_doubled_key(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        raise malformed(str(error)) from None
    except UnicodeDecodeError:
        raise malformed("it is not UTF-8") from None
    except RecursionError:
        raise malformed("it is nested too deep") from None
    if doubled is not None:
        raise malformed(f"an object names {msgspec.json.encode(doubled[:64]).decode()} twice")
    return decoded


def malformed(why: str, *, pointer: str | None = None) -> InvalidArgument:
    detail = f"The body is not valid JSON: {why[:200]}."
    return InvalidArgument(detail, pointer=pointer, code="malformed_json")


_AT = " - at `$"
# The grammar of paths in msgspec's error messages: `.name` and `[index]`.
_STEP = re.compile(r"\.([A-Za-z_][A-Za-z0-9_]*)|\[([0-9]+)\]")
_FIELD = re.compile(r"Object (?:contains unknown|missing required) field `(.*)`\Z", re.DOTALL)


def _invalid(message: str) -> InvalidArgument:
    """Converts an error message of msgspec: its path becomes a JSON pointer."""
    what, _, path = message.rpartition(_AT) if _AT in message else (message, "", "")
    if what.startswith("Number out of range"):
        return malformed("it has a number that is too large")
    pointer = "".join(f"/{name or index}" for name, index in _STEP.findall(path))
    named = _FIELD.match(what)
    if named is not None:
        pointer += "/" + escape_pointer(named[1])
    return InvalidArgument(f"{what[:200]}.", pointer=pointer)


def escape_pointer(name: str) -> str:
    """Escapes one step of a JSON pointer, and shortens it: callers choose the names of fields."""
    return name[:64].replace("~", "~0").replace("/", "~1")


_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_TOO_MANY = b"[" * (limits.JSON_DEPTH_MAX + 1)
# A JSON string: plain characters, then any number of escapes, each with plain characters after it.
# Possessive and atomic, so that an unclosed string fails in linear time. The group is not written
# `(?:...)*+`, which Python 3.11.0 to 3.11.4 match wrongly (CPython issue 106052).
_STRING = re.compile(rb'"[^"\\]*+(?>(?:\\.[^"\\]*+)*)"', re.DOTALL)


def is_too_deep(value: bytes) -> bool:
    """Whether well-formed JSON is nested too deeply, without decoding it.

    The function drops all bytes except brackets, then removes the innermost pairs, layer by layer.
    If brackets remain after the allowed number of layers, the value is too deep. Strings can
    contain brackets too; they are removed, which is slower, only if the first pass fails.
    """
    brackets = value.translate(_ONE_KIND, _NOT_BRACKETS)
    if len(brackets) <= 2 * limits.JSON_DEPTH_MAX or _pairs_off(brackets):
        return False
    return not _pairs_off(_STRING.sub(b"", value).translate(_ONE_KIND, _NOT_BRACKETS))


def _pairs_off(brackets: bytes) -> bool:
    if _TOO_MANY in brackets:
        return False
    for _ in range(limits.JSON_DEPTH_MAX):
        brackets = brackets.replace(b"[]", b"")
    return not brackets


def cap_from(budget: BudgetInput, *, at: str = "/budget") -> BudgetCap:
    """Returns the cap. `at` is the JSON pointer of the budget in the request."""
    if (budget.credits is None) == (budget.cost is None):
        raise InvalidArgument("A budget needs either credits or cost.", pointer=at)
    if budget.credits is not None:
        return BudgetCap(Unit.CREDITS, budget.credits)
    amount = micros_from(budget.cost or "")
    if not amount:
        raise InvalidArgument("The cost of a budget must be more than 0.", pointer=f"{at}/cost")
    return BudgetCap(Unit.COST, amount)


def host_limits_from(limits_input: HostLimitsInput | None) -> HostLimits | None:
    if limits_input is None:
        return None
    hosts = {_host_from(name): _limit_from(limit) for name, limit in limits_input.hosts.items()}
    default = HostLimit(limits_input.concurrency, limits_input.rate_per_s)
    if default == HostLimit() and not hosts:
        raise InvalidArgument("host_limits must have at least one limit.", pointer="/host_limits")
    return HostLimits(default, hosts)


def _host_from(name: str) -> str:
    target = parse_url(f"http://{name}/")
    if isinstance(target, BadUrl) or target.port != 80 or target.path_and_query != "/":
        raise InvalidArgument(
            "A host must be a name or an address, without a port or a path.",
            pointer="/host_limits/hosts",
        )
    return target.host


def _limit_from(limit: HostLimitInput) -> HostLimit:
    return HostLimit(limit.concurrency, limit.rate_per_s)
