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
from conveyor.domain.budget import BudgetCap, Unit, micros_from
from conveyor.domain.errors import InvalidArgument
from conveyor.domain.model import HostLimit, HostLimits, ListFormat, ListSpec
from conveyor.domain.submit.admission import EXTERNAL_ID_PATTERN, TaskDraft
from conveyor.domain.submit.scraper_params import PARAMS, RESPONSE_TYPES, find_doubled_key
from conveyor.domain.submit.target import LOCATION_CHARS_MAX, BadUrl, parse_url
from conveyor.schemas.schedule import JobSchedule, UpdateScheduleStateRequest

T = TypeVar("T")

# In Python, `$` also matches before a final line break; `(?!\n)` excludes it. These patterns are
# also in openapi.json, and in other dialects the look-ahead changes nothing.
_EXTERNAL_ID = EXTERNAL_ID_PATTERN + r"(?!\n)"
# Control characters and line separators, which a terminal or a log would interpret.
_NO_CONTROLS = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$(?!\n)"

# Decimal text: a JSON number would become a float and lose digits. `$(?!\n)` is explained above.
_MONEY = r"^[0-9]{1,9}(\.[0-9]{1,6})?$(?!\n)"

Concurrency = Annotated[int, Meta(ge=1, le=limits.MAX_INFLIGHT_MAX)]
Rate = Annotated[float, Meta(ge=limits.HOST_RATE_MIN, le=limits.HOST_RATE_MAX)]


class BudgetInput(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The most that each run may spend: either credits, or money as decimal text."""

    #: Credits of the gateway.
    credits: Annotated[int, Meta(ge=1, le=limits.BUDGET_CREDITS_MAX)] | None = None
    #: Money in the currency of the gateway, such as `12.50`.
    cost: Annotated[str, Meta(pattern=_MONEY)] | None = None


class HostLimitInput(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The limits of one host. An omitted field means no limit."""

    concurrency: Concurrency | None = None  #: Fetches of the host at the same time.
    rate_per_s: Rate | None = None  #: Fetches of the host that begin in a second.


class HostLimitsInput(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The limits of each host of the job."""

    concurrency: Concurrency | None = None  #: Fetches of one host at the same time.
    rate_per_s: Rate | None = None  #: Fetches of one host that begin in a second.
    #: Limits of named hosts. They replace the limits above as a whole.
    hosts: Annotated[dict[str, HostLimitInput], Meta(max_length=limits.HOST_OVERRIDES_MAX)] = {}


_PARAM = {"type": ["string", "boolean", "integer"], "maxLength": limits.PARAM_VALUE_CHARS_MAX}
_PARAM_SCHEMAS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(sorted(PARAMS), _PARAM),
    "custom_headers": {"type": ["object", "string"]},
    "mode": {"type": "string", "enum": ["auto"]},
    "response_type": {"type": "string", "enum": sorted(RESPONSE_TYPES)},
}
PARAMS_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        name: {**schema, "description": PARAMS[name]} for name, schema in _PARAM_SCHEMAS.items()
    },
    "additionalProperties": False,
}


class TaskInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of a list: a URL, and optionally how to fetch it."""

    #: An http or https URL.
    url: Annotated[
        Any,
        Meta(
            extra_json_schema={
                "type": "string",
                "format": "uri",
                "maxLength": limits.URL_CHARS_MAX,
            }
        ),
    ] = None
    #: The caller's own id for the line. It need not be unique.
    external_id: Annotated[
        Any, Meta(extra_json_schema={"type": "string", "pattern": EXTERNAL_ID_PATTERN})
    ] = None
    #: The caller's own data. It is kept with the task and returned with its result.
    metadata: Annotated[
        Any,
        Meta(
            extra_json_schema={
                "type": "object",
                "maxProperties": limits.METADATA_KEYS_MAX,
                "additionalProperties": {
                    "type": "string",
                    "maxLength": limits.METADATA_VALUE_CHARS_MAX,
                },
            }
        ),
    ] = None
    #: The method of the request. A POST may be sent more than once: use it for requests that are
    #: safe to repeat.
    method: Annotated[Any, Meta(extra_json_schema={"type": "string", "enum": ["GET", "POST"]})] = (
        None
    )
    #: The body of a POST. Text is sent as a form, any other value as JSON.
    body: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    #: Parameters of this line. They win over those of the job.
    zenrows_params: Annotated[Any, Meta(extra_json_schema=PARAMS_SCHEMA)] = None


OnInvalidInput = Literal["reject", "skip"]
ColumnInput = Annotated[int, Meta(ge=0, le=100_000)] | Annotated[str, Meta(min_length=1)]


class WebhookInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The URL that is called at the end of a run, and whether calls are signed."""

    #: A public https URL.
    url: Annotated[str, Meta(max_length=limits.URL_CHARS_MAX)]
    signature: bool = False  #: Whether deliveries are signed. This needs an active signing key.


class WebhookConfigInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A complete webhook. It replaces the previous one, so every field is required."""

    #: A public https URL.
    url: Annotated[str, Meta(max_length=limits.URL_CHARS_MAX)]
    signature: bool  #: Whether deliveries are signed. This needs an active signing key.


class SubmitJobRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job: its list, the settings for all lines, and its webhook."""

    #: `scheduled`: the job is run by its `schedule`.
    type: Literal["regular", "scheduled"] = "regular"
    #: An `open` job accepts further lists until it is closed.
    status: Literal["open", "closed"] = "closed"
    #: The list: one task per line.
    tasks: Annotated[list[TaskInput], Meta(max_length=limits.TASKS_MAX)] | None = None
    #: Scraper parameters of every line.
    zenrows_params: Annotated[dict[str, Any], Meta(extra_json_schema=PARAMS_SCHEMA)] | None = None
    #: The caller's own id for the job. It need not be unique.
    external_id: Annotated[str, Meta(pattern=_EXTERNAL_ID)] | None = None
    #: A name for people.
    name: Annotated[str, Meta(max_length=limits.NAME_CHARS_MAX, pattern=_NO_CONTROLS)] | None = None
    #: The caller's own data, as texts. It is returned with the job and in webhooks.
    metadata: dict[str, Any] | None = None
    webhook: WebhookInput | None = None  #: The receiver of the ends of runs.
    file_input_id: str | None = None  #: An uploaded list, instead of `tasks`.
    schedule: JobSchedule | None = None  #: When a `scheduled` job runs.
    #: What an invalid line does: it refuses the list, or becomes a failed task. In an uploaded list
    #: it always becomes a failed task.
    on_invalid: OnInvalidInput = "reject"
    #: Tasks of the job that may be fetched at the same time. The server has a default.
    max_inflight: Annotated[int, Meta(ge=1, le=limits.MAX_INFLIGHT_MAX)] | None = None
    #: Attempts that a task has before it fails; 3 if it is omitted.
    max_attempts: Annotated[int, Meta(ge=1, le=limits.MAX_ATTEMPTS_MAX)] | None = None
    #: The weight of the job among the jobs of its caller.
    priority: Annotated[int, Meta(ge=1, le=limits.PRIORITY_MAX)] = 1
    #: Days that results are kept after the end of their run; 14 if it is omitted. The server
    #: refuses more days than it keeps bodies, which is 30 unless the operator changed it.
    result_ttl_days: Annotated[int, Meta(ge=1, le=limits.RESULT_TTL_DAYS_MAX)] | None = None
    budget: BudgetInput | None = None  #: The most that each run may spend.
    host_limits: HostLimitsInput | None = None  #: The limits of each host.
    #: Whether the duplicates of each list share one fetch: lines with the same normalised URL,
    #: method, body, parameters and headers.
    dedup: bool = False
    #: The token of a Step Functions task that waits for the first run. Only the AWS engine
    #: accepts it.
    sfn_task_token: (
        Annotated[str, Meta(pattern=rf"^[!-~]{{1,{limits.TASK_TOKEN_CHARS_MAX}}}$(?!\n)")] | None
    ) = None


class AddTasksRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A further list for an open job."""

    #: The list: one task per line.
    tasks: Annotated[list[TaskInput], Meta(max_length=limits.TASKS_MAX)]
    last_batch: bool = False  #: Closes the job after this list.
    #: What an invalid line does: it refuses the list, or becomes a failed task.
    on_invalid: OnInvalidInput = "reject"


class CsvFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The columns that contain the fields of a task."""

    url: ColumnInput  #: The column of the URL: its position from 0, or its name in the header.
    external_id: ColumnInput | None = None  #: The column of the `external_id`.


class CsvInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The columns and the dialect of a CSV file."""

    fields: CsvFields  #: The columns that are read.
    #: The character between cells; a comma if it is omitted.
    delimiter: Annotated[str, Meta(min_length=1, max_length=1)] | None = None
    #: The character around quoted cells; a double quote if it is omitted.
    quote: Annotated[str, Meta(min_length=1, max_length=1)] | None = None
    header: bool | None = None  #: Whether the first row names the columns.


class CreateJobInputRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A slot for a list, and the format of the list."""

    type: Literal["csv"] = "csv"  #: The format in the contract of older clients.
    #: The format of the list. `ndjson`: one task per line, as in `tasks`. `text`: one URL per line.
    format: Literal["csv", "ndjson", "text"] | None = None
    csv: CsvInput | None = None  #: How a CSV list is read.


class BucketInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An object of an S3 bucket, and keys that may put it. The keys are encrypted while they are
    stored, removed after the delivery, and never returned."""

    #: The name of the bucket.
    bucket: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$(?!\n)")]
    key: Annotated[str, Meta(min_length=1, max_length=1024)]  #: The name of the object.
    #: The region of the bucket.
    region: Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,32}$(?!\n)")] = "us-east-1"
    #: The id of the access key.
    access_key_id: Annotated[str, Meta(pattern=r"^[!-~]{1,256}$(?!\n)")]
    #: The secret access key.
    secret_access_key: Annotated[str, Meta(pattern=r"^[!-~]{1,256}$(?!\n)")]
    #: The token of temporary keys.
    session_token: Annotated[str, Meta(pattern=r"^[!-~]{1,4096}$(?!\n)")] | None = None
    #: The https URL of a compatible service, instead of AWS.
    endpoint: Annotated[str, Meta(max_length=limits.URL_CHARS_MAX)] | None = None


class DestinationInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the file is put: either a presigned URL, or an object of a bucket."""

    #: An https URL that accepts a PUT of the file. It is encrypted while it is stored.
    url: Annotated[str, Meta(max_length=LOCATION_CHARS_MAX)] | None = None
    s3: BucketInput | None = None  #: An object of an S3 bucket.


class StartExportRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What else is to be done with the file."""

    destination: DestinationInput | None = None  #: Where the file is put when it is complete.


class _NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of an operation without options."""


_NO_OPTIONS = msgspec.json.Decoder(_NoOptions)
_START_EXPORT = msgspec.json.Decoder(StartExportRequest)
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


def decode_start_export(body: bytes) -> StartExportRequest:
    return decode_strictly(_START_EXPORT, body)


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


def check_no_options(body: bytes) -> None:
    """Refuses options in the body of an operation that has none there. If a filter in the body of a
    rerun were ignored, the rerun would repeat every task."""
    if body.strip() not in {b"", b"null"}:
        decode_strictly(_NO_OPTIONS, body)


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
