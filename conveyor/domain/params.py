"""Scraper parameters: the keys that exist, their canonical strings, and what follows
(docs/api.md, Scraper parameters)."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from conveyor.domain import limits
from conveyor.domain.errors import ConveyorError
from conveyor.domain.json_keys import find_doubled_key
from conveyor.domain.model import Format

PARAMS = frozenset(
    {
        "allowed_status_codes",
        "autoparse",
        "block_resources",
        "css_extractor",
        "custom_headers",
        "extract",
        "js_instructions",
        "js_render",
        "json_response",
        "mode",
        "original_status",
        "outputs",
        "premium_proxy",
        "proxy_country",
        "response_type",
        "session_id",
        "wait",
        "wait_for",
    }
)
NOT_WITH_POST = frozenset({"js_render", "js_instructions", "json_response"})
RESPONSE_TYPES = frozenset({"markdown", "plaintext", "pdf"})

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*\Z")
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "content-length",
        "host",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)

_STATUS = re.compile(r" *[1-9][0-9]{2} *\Z")
# Python refuses to write a number of thousands of digits as text, and no parameter needs one.
_INT_BITS_MAX = 64

ParamInput = Mapping[str, object]


class InvalidParam(ConveyorError):
    """A parameter that is unknown, or has a value it may not have; `reason` is the contract's."""

    def __init__(self, reason: str, key: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.key = key
        self.detail = detail


class Params(msgspec.Struct, frozen=True):
    """Checked parameters; the headers stand apart because they are sealed at rest."""

    values: dict[str, str]
    headers: dict[str, str] | None


def check_params(given: ParamInput) -> Params:
    """The canonical form of what a caller sent; InvalidParam for the first thing wrong in it."""
    values: dict[str, str] = {}
    headers: dict[str, str] | None = None
    for key, value in given.items():
        if key not in PARAMS:
            raise InvalidParam("unknown_param", key, f"There is no parameter {key[:64]!r}.")
        if key == "custom_headers":
            headers = _check_headers(value)
        else:
            values[key] = _canonical(key, value)
    _check_combination(values)
    _check_size(values)
    return Params(values, headers)


def derive_format(values: Mapping[str, str]) -> Format:
    """The format that the bodies of a job will have."""
    response_type = values.get("response_type", "")
    if response_type in RESPONSE_TYPES:
        return Format(response_type)
    if "true" in (values.get("autoparse"), values.get("json_response")):
        return Format.JSON
    if values.get("css_extractor") or values.get("extract"):
        return Format.JSON
    return Format.HTML


def content_type_of(body_format: Format) -> str:
    return {
        Format.HTML: "text/html; charset=utf-8",
        Format.JSON: "application/json",
        Format.MARKDOWN: "text/markdown; charset=utf-8",
        Format.PLAINTEXT: "text/plain; charset=utf-8",
        Format.PDF: "application/pdf",
    }[body_format]


def _canonical(key: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        if value.bit_length() > _INT_BITS_MAX:
            raise _bad_value(key, "is a number that is too large")
        text = str(value)
    elif isinstance(value, str):
        text = value
    else:
        raise _bad_value(key, "must be a string, a boolean or a whole number")
    if len(text) > limits.PARAM_VALUE_CHARS_MAX or not _is_text(text):
        raise _bad_value(key, f"must be text of at most {limits.PARAM_VALUE_CHARS_MAX} characters")
    return text


def _check_combination(values: Mapping[str, str]) -> None:
    if not _are_statuses(values.get("allowed_status_codes", "")):
        most = limits.STATUS_CODES_MAX
        rule = f"must be at most {most} three-digit statuses with commas between them: 404,500"
        raise _bad_value("allowed_status_codes", rule)
    if values.get("mode", "auto") != "auto":
        raise _bad_value("mode", 'must be "auto"')
    if (chosen := values.get("response_type")) is not None and chosen not in RESPONSE_TYPES:
        raise _bad_value("response_type", f"must be one of {', '.join(sorted(RESPONSE_TYPES))}")


def _are_statuses(text: str) -> bool:
    """Whether it is a list of statuses; an empty one names none."""
    words = text.split(",", limits.STATUS_CODES_MAX)
    are_plain = all(_STATUS.match(word) for word in words)
    return not text.strip(" ") or (len(words) <= limits.STATUS_CODES_MAX and are_plain)


def _check_size(values: Mapping[str, str]) -> None:
    sizes = {key: len(value.encode()) for key, value in values.items()}
    if sum(sizes.values()) > limits.PARAMS_BYTES_MAX:
        largest = max(sizes, key=sizes.__getitem__)
        rule = f"is too long: all parameters may take {limits.PARAMS_BYTES_MAX} bytes together"
        raise _bad_value(largest, rule)


def _check_headers(value: object) -> dict[str, str]:
    key = "custom_headers"
    if isinstance(value, str):
        try:
            decoded, doubled = msgspec.json.decode(value), find_doubled_key(value)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            raise _bad_value(key, "must be an object, or an object as JSON text") from None
        if doubled is not None:
            raise _bad_value(key, "names a header twice")
        value = decoded
    if not isinstance(value, dict):
        raise _bad_value(key, "must be an object of header names and values")
    if len(value) > limits.CUSTOM_HEADERS_MAX:
        raise _bad_value(key, f"may hold at most {limits.CUSTOM_HEADERS_MAX} headers")
    headers = {str(name): _check_header(str(name), text) for name, text in value.items()}
    if len(msgspec.json.encode(headers)) > limits.CUSTOM_HEADERS_BYTES_MAX:
        raise _bad_value(key, f"may take at most {limits.CUSTOM_HEADERS_BYTES_MAX} bytes")
    return headers


def _check_header(name: str, value: object) -> str:
    key = "custom_headers"
    if _TOKEN.match(name) is None:
        raise _bad_value(key, "has a header name that is not an HTTP token")
    if name.lower() in _HOP_BY_HOP or name.lower().startswith("proxy-"):
        raise _bad_value(key, f"may not set {name}")
    if not isinstance(value, str) or _HEADER_VALUE.match(value) is None:
        raise _bad_value(key, f"has a value for {name} that no header can have")
    return value


def _bad_value(key: str, rule: str) -> InvalidParam:
    return InvalidParam("invalid_param_value", key, f"{key} {rule}.")


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\x00" not in text
