"""Keys that a JSON object names twice: found without building the document
(docs/api.md, Conventions).

Decoders take the last of two equal keys and say nothing, while a proxy or a reviewer may have read
the first. The standard library's scanner hands over each object's pairs: measured, that costs 0.2
microseconds for a line with a URL and 1.2 for one with metadata and parameters, a sixth of what
decoding the same line takes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from conveyor.domain import limits
from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import Format, Result
from conveyor.domain.submit.conditions import CONDITIONS, find_invalid


class _Doubled(Exception):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def find_doubled_key(document: bytes | str) -> str | None:
    """The first key that an object at any depth of this well-formed document names twice."""
    text = document if isinstance(document, str) else document.decode()
    try:
        _SCANNER.decode(text)
    except _Doubled as doubled:
        return doubled.key
    return None


def _check_pairs(pairs: list[tuple[str, object]]) -> None:
    if len(pairs) > 1 and len({key for key, _ in pairs}) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Doubled(key)
            seen.add(key)


# Numbers stay text: Python refuses to make an int of more than 4,300 digits.
_SCANNER = json.JSONDecoder(object_pairs_hook=_check_pairs, parse_int=str, parse_float=str)


# Scraper parameters: the keys that exist, their canonical strings, and what follows
# (docs/api.md, Scraper parameters).


# Each parameter with its meaning. The gateway interprets most of them.
PARAMS: Mapping[str, str] = {
    "allowed_status_codes": "Statuses of the site that count as a page, such as `404,500`.",
    "autoparse": "Returns the data of the page as JSON, if the gateway knows the site.",
    "block_resources": "Kinds of resources that a rendered page does not load, such as `image`.",
    "css_extractor": "Names and CSS selectors as JSON text: returns what the selectors match.",
    "custom_headers": "Headers that are sent to the site, as an object or as JSON text of one.",
    "extract": "A description of the data to extract; returns it as JSON.",
    "js_instructions": "A list of browser actions, as JSON text; needs `js_render`.",
    "js_render": "Renders the page in a browser.",
    "json_response": "Returns the page with its network requests as JSON; needs `js_render`.",
    "min_bytes": "A page with fewer bytes is no success.",
    "mode": "`auto`: the gateway chooses rendering and proxies by itself.",
    "must_contain": "A page without this text is no success.",
    "must_match": "A page that this pattern (RE2) does not match is no success.",
    "original_status": "Returns the status of the site instead of the gateway's.",
    "outputs": "Kinds of data to return, such as `emails,links`.",
    "premium_proxy": "Fetches the page through a residential proxy.",
    "proxy_country": "The country of the proxy, as a code of two letters; needs `premium_proxy`.",
    "response_type": "The form of the page: `markdown`, `plaintext` or `pdf`.",
    "session_id": "Fetches with the same number use the same proxy address for a while.",
    "wait": "Milliseconds that a rendered page is left to load; needs `js_render`.",
    "wait_for": "A CSS selector that a rendered page must have first; needs `js_render`.",
}
# What a direct fetch does with the parameters that it honours. It has no browser and no proxies of
# a country; a list that needs one of them is refused when it is submitted. Of a parameter with `=`,
# it honours only that value.
DIRECT_PARAMS: Mapping[str, str] = {
    "allowed_status_codes": "honoured; the content of such a page is not judged",
    "autoparse": "with `conveyor[gateway]`: JSON-LD, microdata and OpenGraph of the page",
    "css_extractor": "with `conveyor[gateway]`",
    "custom_headers": "honoured",
    "min_bytes": "honoured",
    "must_contain": "honoured",
    "must_match": "honoured",
    "original_status": "always so: the status of the site is the only one",
    "outputs": "with `conveyor[gateway]`",
    "response_type=markdown": "with `conveyor[gateway]`",
    "response_type=plaintext": "with `conveyor[gateway]`",
}
# The same of `conveyor gateway`.
OWN_PARAMS: Mapping[str, str] = {
    **{key: words for key, words in DIRECT_PARAMS.items() if key != "original_status"},
    "block_resources": "honoured",
    "custom_headers": "honoured, and sent only to the origin of the URL",
    "js_instructions": "honoured",
    "js_render": "honoured: a browser renders the page",
    "json_response": "honoured",
    "mode": "honoured: a browser renders what a plain fetch does not get",
    "original_status": "honoured",
    "premium_proxy": "with proxies of the class `premium`",
    "proxy_country": "with proxies of the country",
    "response_type=pdf": "`pdf` honoured",
    "session_id": "honoured: the same proxy; without proxies, all pages have one address",
    "wait": "honoured, up to 30 s",
    "wait_for": "honoured, up to 45 s",
}
# Of these, `conveyor gateway` honours what its proxies can do.
PROXY_PARAMS = frozenset({"premium_proxy", "proxy_country"})
# The parameters that turn a page into another document. A page has one of them, because it has one
# result.
EXTRACTING = frozenset({"autoparse", "css_extractor", "outputs", "response_type"})
# The kinds of data that `outputs` may name; `*` names all.
OUTPUTS = frozenset(
    {
        "audios",
        "emails",
        "favicon",
        "hashtags",
        "headings",
        "images",
        "links",
        "menus",
        "metadata",
        "phone_numbers",
        "tables",
        "videos",
    }
)
OF_THE_BROWSER = frozenset(
    {"block_resources", "js_instructions", "js_render", "json_response", "wait", "wait_for"}
)
# A parameter with one of these values asks for nothing.
_OFF = frozenset({"", "false", "0"})
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

_ALLOWED_STATUS = re.compile(r"[0-9]{3}\Z")
_STATUS = re.compile(r" *[1-9][0-9]{2} *\Z")
# Python refuses to write a number of thousands of digits as text, and no parameter needs one.
_INT_BITS_MAX = 64

ParamInput = Mapping[str, object]


class InvalidParam(ConveyorError):
    """A parameter that is unknown, has a value it may not have, or is not honoured by the gateway.
    `reason` is the contract's, or `unsupported_param`."""

    def __init__(self, reason: str, key: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.key = key
        self.detail = detail


class Params(msgspec.Struct, frozen=True):
    """Checked parameters; the headers stand apart because they are sealed at rest."""

    values: dict[str, str]
    headers: dict[str, str] | None


def check_params(params: ParamInput) -> Params:
    """The canonical form of what a caller sent; InvalidParam for the first thing wrong in it."""
    values: dict[str, str] = {}
    headers: dict[str, str] | None = None
    for key, value in params.items():
        if key not in PARAMS:
            raise InvalidParam("unknown_param", key, f"There is no parameter {key[:64]!r}.")
        if key == "custom_headers":
            headers = _check_headers(value)
        else:
            values[key] = _canonical(key, value)
    _check_combination(values)
    _check_size(values)
    return Params(values, headers)


@dataclass(frozen=True, slots=True)
class GatewaySupport:
    """The parameters that the configured gateway honours. It refuses all others, because ignoring
    one would return another page than the caller asked for.

    `check_selector` returns the error of a selector, for a gateway that selects by itself. Such a
    gateway checks what it extracts before it fetches anything. `check_rendering` returns what
    `rendering` would refuse about the values of these parameters.
    """

    honoured: frozenset[str]
    #: What the gateway does with a page that needs a browser, if it sends such pages elsewhere.
    rendering: GatewaySupport | None = None
    check_selector: Callable[[str], str | None] | None = None
    check_rendering: Callable[[Mapping[str, str]], str | None] | None = None

    def find_unsupported(self, params: Mapping[str, str]) -> list[str]:
        """Returns the parameters that ask for something that the gateway does not do."""
        if not params:
            return []
        return sorted(
            key
            for key in params.keys() - self.honoured
            if params[key].lower() not in _OFF and f"{key}={params[key]}" not in self.honoured
        )

    def check(
        self, params: Mapping[str, str], job_params: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Raises InvalidParam for the first parameter that the gateway does not honour.

        `job_params` are those of the job, if `params` are those of a line.
        """
        if self.rendering is not None and needs_browser({**job_params, **params}):
            self.rendering.check(params, job_params)
            self._check_rendering({**job_params, **params})
            return
        for key in self.find_unsupported(params):
            remedy = _remedy(key, params[key], can_render=self.rendering is not None)
            raise InvalidParam("unsupported_param", key, remedy)
        if self.check_selector is not None:
            _check_extraction(params, job_params, self.check_selector)

    def _check_rendering(self, params: Mapping[str, str]) -> None:
        error = None if self.check_rendering is None else self.check_rendering(params)
        if error is not None:
            key = next((key for key in params if error.startswith(key)), "js_render")
            raise InvalidParam("invalid_param_value", key, error)


def needs_browser(params: Mapping[str, str]) -> bool:
    """Returns whether a browser renders the page, or may, as with `mode=auto`."""
    if "mode" in params:
        return True
    return params.get("js_render", "").lower() not in _OFF


def _remedy(key: str, value: str, *, can_render: bool) -> str:
    if key in OF_THE_BROWSER or value == "pdf":
        if can_render:
            return f"{'response_type=pdf' if value == 'pdf' else key} needs js_render=true."
        return (
            f"{key} needs a gateway with a browser. `conveyor dev`, `scrape` and `gateway` render "
            "pages if Chromium is installed (apt install chromium, or pip install "
            "'conveyor[browser]' and playwright install chromium), and CONVEYOR_GATEWAY_URL names "
            "a gateway elsewhere. Here, pages are fetched directly."
        )
    remote = "a gateway that can do this (CONVEYOR_GATEWAY_URL). Here, pages are fetched directly."
    if key == "extract":
        return (
            "extract needs the hosted service (CONVEYOR_GATEWAY_URL). css_extractor, autoparse and "
            "outputs extract without it."
        )
    if key in PROXY_PARAMS or key == "session_id":
        return (
            f"{key} needs a gateway with such proxies: `conveyor gateway` takes a list of them "
            "(CONVEYOR_GATEWAY_PROXIES), and CONVEYOR_GATEWAY_URL names the gateway."
        )
    if key in EXTRACTING and value != "pdf":
        return f"{key} needs `pip install 'conveyor[gateway]'` where Conveyor runs, or {remote}"
    return f"{key} needs {remote}"


def _check_extraction(
    params: Mapping[str, str],
    job_params: Mapping[str, str],
    check_selector: Callable[[str], str | None],
) -> None:
    extracting = find_extracting({**job_params, **params})
    if len(extracting) > 1 and (clash := extracting & params.keys()):
        rule = f"cannot be combined with {', '.join(sorted(extracting - {min(clash)}))}"
        raise _bad_value(min(clash), rule)
    if params.get("autoparse", "true").lower() not in _OFF | {"true", "1"}:
        raise _bad_value("autoparse", "must be true or false")
    for name in split_outputs(params.get("outputs", "")):
        if name not in OUTPUTS:
            raise _bad_value("outputs", f"may name {', '.join(sorted(OUTPUTS))}, or be *")
    for selector in read_extractor(params.get("css_extractor", "")).values():
        if (error := check_selector(selector)) is not None:
            raise _bad_value("css_extractor", f"has a selector that cannot be used: {error}")


def find_extracting(params: Mapping[str, str]) -> frozenset[str]:
    """Returns the parameters that ask for another document than the page itself."""
    return frozenset(key for key in EXTRACTING if params.get(key, "").lower() not in _OFF)


def split_outputs(text: str) -> list[str]:
    """Returns the names in a list such as `emails,links`; for `*` all of them."""
    names = [name for word in text.split(",") if (name := word.strip())]
    return sorted(OUTPUTS) if names == ["*"] else names


def read_extractor(text: str) -> dict[str, str]:
    """Reads the JSON of `css_extractor`: names and selectors. Raises InvalidParam."""
    if text.lower() in _OFF:
        return {}
    try:
        selectors = msgspec.json.decode(text, type=dict[str, str])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        raise _bad_value("css_extractor", "must be an object of names and selectors") from None
    if find_doubled_key(text) is not None:
        raise _bad_value("css_extractor", "has a name twice")
    if len(selectors) > limits.SELECTORS_MAX:
        raise _bad_value("css_extractor", f"may have at most {limits.SELECTORS_MAX} selectors")
    return selectors


def without_extraction(params: Mapping[str, str]) -> GatewaySupport:
    """Returns the support of a gateway that lacks the packages that extract."""
    return GatewaySupport(
        frozenset(
            key
            for key in params
            if key == "response_type=pdf" or key.partition("=")[0] not in EXTRACTING
        )
    )


DIRECT_SUPPORT = without_extraction(DIRECT_PARAMS)
# A remote gateway refuses by itself what its plan does not include.
REMOTE_SUPPORT = GatewaySupport(frozenset(PARAMS))


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


def allowed_statuses(params: Mapping[str, str]) -> frozenset[int]:
    """Returns the statuses that count as a page, from a list such as `404,500`."""
    text = params.get("allowed_status_codes")
    if not text:
        return frozenset()
    words = (word.strip() for word in text.split(","))
    # Earlier releases stored the text unchecked, so invalid words are ignored.
    return frozenset(int(word) for word in words if _ALLOWED_STATUS.match(word))


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
    if CONDITIONS & values.keys() and (invalid := find_invalid(values)) is not None:
        raise _bad_value(*invalid)


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


# What a body is called: its type, and the ending of a file that holds it
# (docs/api.md, Results).


_CONTENT_TYPE = re.compile(
    r"[A-Za-z0-9!#$&^_.+-]+/[A-Za-z0-9!#$&^_.+-]+(?:\s*;\s*[A-Za-z0-9!#$&^_.+-]+=[\x20-\x7e]{1,80})?\Z"
)
# Not `mimetypes`: it reads files of the machine, and calls application/xml "xsl".
_EXTENSIONS = {
    "application/gzip": "gz",
    "application/javascript": "js",
    "application/json": "json",
    "application/pdf": "pdf",
    "application/xhtml+xml": "html",
    "application/xml": "xml",
    "application/zip": "zip",
    "audio/mpeg": "mp3",
    "image/avif": "avif",
    "image/bmp": "bmp",
    "image/gif": "gif",
    "image/jpeg": "jpg",
    "image/png": "png",
    "image/svg+xml": "svg",
    "image/tiff": "tiff",
    "image/vnd.microsoft.icon": "ico",
    "image/webp": "webp",
    "text/css": "css",
    "text/csv": "csv",
    "text/html": "html",
    "text/javascript": "js",
    "text/markdown": "md",
    "text/plain": "txt",
    "text/xml": "xml",
    "video/mp4": "mp4",
    "video/webm": "webm",
}


def content_type_for(body_format: Format, result: Result) -> str:
    """The format's own type. A page that turned out to be something else keeps what it said."""
    stored = result.content_type.strip()
    says_more = stored.lower() != "text/html" and _CONTENT_TYPE.match(stored) is not None
    if body_format is Format.HTML and says_more:
        return stored
    return content_type_of(body_format)


def extension_for(content_type: str) -> str:
    """The ending of a file, without its dot; `bin` for a type that is not in the table."""
    return _EXTENSIONS.get(content_type.partition(";")[0].strip().lower(), "bin")
