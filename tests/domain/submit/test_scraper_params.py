"""Scraper parameters: the known keys, one spelling for each value, and headers that cannot be
injected."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.domain import limits
from conveyor.domain.model import Format
from conveyor.domain.submit.conditions import CONDITIONS
from conveyor.domain.submit.scraper_params import (
    DIRECT_PARAMS,
    DIRECT_SUPPORT,
    EXTRACTING,
    OWN_PARAMS,
    PARAMS,
    REMOTE_SUPPORT,
    RESPONSE_TYPES,
    GatewaySupport,
    InvalidParam,
    check_params,
    content_type_of,
    derive_format,
)

PLAIN = PARAMS.keys() - {
    "allowed_status_codes",
    "custom_headers",
    "min_bytes",
    "mode",
    "response_type",
}

EXTRACTING_SUPPORT = GatewaySupport(
    frozenset(DIRECT_PARAMS),
    check_selector=lambda selector: "it is bad" if selector == "bad" else None,
)


def reason_of(params_in: dict[str, object]) -> str:
    with pytest.raises(InvalidParam) as refusal:
        check_params(params_in)
    return refusal.value.reason


def test_the_parameters_are_those_of_the_contract_plus_extract_and_the_conditions() -> None:
    contract = """mode js_render js_instructions custom_headers premium_proxy proxy_country
    session_id original_status allowed_status_codes wait_for wait block_resources json_response
    css_extractor autoparse response_type outputs"""

    assert set(contract.split()) | {"extract"} | CONDITIONS == PARAMS.keys()


def test_the_total_size_of_all_parameters_is_limited() -> None:
    params_in: dict[str, object] = {"css_extractor": "x" * 14_000, "js_instructions": "y" * 15_000}

    with pytest.raises(InvalidParam, match=r"js_instructions is too long: all parameters may take"):
        check_params(params_in)


@pytest.mark.parametrize("key", sorted(PLAIN))
@pytest.mark.parametrize(
    ("value", "canonical"), [("text", "text"), (True, "true"), (False, "false"), (1500, "1500")]
)
def test_every_parameter_accepts_text_booleans_and_whole_numbers(
    key: str, value: object, canonical: str
) -> None:
    assert check_params({key: value}).values == {key: canonical}


@pytest.mark.parametrize("value", [1.5, None, [], {}, ["a"]])
def test_other_kinds_of_value_are_refused(value: object) -> None:
    assert reason_of({"wait": value}) == "invalid_param_value"


@pytest.mark.parametrize("key", ["url", "apikey", "JS_RENDER", "", "wait ", "x" * 500])
def test_a_parameter_that_does_not_exist_is_unknown(key: str) -> None:
    assert reason_of({key: "1"}) == "unknown_param"


def test_text_has_a_maximum_length_and_no_control_characters() -> None:
    longest = "x" * limits.PARAM_VALUE_CHARS_MAX

    assert check_params({"css_extractor": longest}).values == {"css_extractor": longest}
    assert reason_of({"css_extractor": longest + "x"}) == "invalid_param_value"
    assert reason_of({"css_extractor": "a\x00b"}) == "invalid_param_value"
    assert reason_of({"css_extractor": "\ud800"}) == "invalid_param_value"


@pytest.mark.parametrize("value", sorted(RESPONSE_TYPES))
def test_each_response_type_is_a_format(value: str) -> None:
    assert derive_format(check_params({"response_type": value}).values) is Format(value)


def test_enumerated_parameters_accept_only_their_values() -> None:
    assert check_params({"mode": "auto"}).values == {"mode": "auto"}
    assert reason_of({"mode": "manual"}) == "invalid_param_value"
    assert reason_of({"response_type": "html"}) == "invalid_param_value"


@pytest.mark.parametrize(
    ("params_in", "expected"),
    [
        ({}, Format.HTML),
        ({"js_render": True}, Format.HTML),
        ({"autoparse": True}, Format.JSON),
        ({"autoparse": False}, Format.HTML),
        ({"json_response": True}, Format.JSON),
        ({"css_extractor": '{"a":"b"}'}, Format.JSON),
        ({"css_extractor": ""}, Format.HTML),
        ({"extract": "x"}, Format.JSON),
        ({"response_type": "pdf", "autoparse": True}, Format.PDF),
        ({"response_type": "markdown", "css_extractor": "x"}, Format.MARKDOWN),
    ],
)
def test_an_explicit_response_type_outranks_the_format_of_other_parameters(
    params_in: dict[str, object], expected: Format
) -> None:
    assert derive_format(check_params(params_in).values) is expected


def test_every_format_has_a_content_type() -> None:
    assert all("/" in content_type_of(body_format) for body_format in Format)


@pytest.mark.parametrize("params_in", [{"X-One": "1"}, '{"X-One": "1"}'])
def test_headers_are_accepted_as_an_object_or_as_its_json_text(params_in: object) -> None:
    params = check_params({"custom_headers": params_in, "wait": 5})

    assert params.headers == {"X-One": "1"}
    assert params.values == {"wait": "5"}


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param({"X": "a\r\nB: c"}, id="line break in a value"),
        pytest.param({"X": "a\nB: c"}, id="bare line feed"),
        pytest.param({"X": "a\x00"}, id="nought byte"),
        pytest.param({"X\r\nB": "c"}, id="line break in a name"),
        pytest.param({"X Y": "c"}, id="space in a name"),
        pytest.param({"X:": "c"}, id="colon in a name"),
        pytest.param({"": "c"}, id="empty name"),
        pytest.param({"Naïve": "c"}, id="name beyond ASCII"),
        pytest.param({"X": "snow ☃"}, id="value beyond Latin-1"),
        pytest.param({"X": 5}, id="number"),
        pytest.param({"X": None}, id="null"),
        pytest.param({f"X-{n}": "1" for n in range(limits.CUSTOM_HEADERS_MAX + 1)}, id="too many"),
        pytest.param({"X": "1" * limits.CUSTOM_HEADERS_BYTES_MAX}, id="too large"),
    ],
)
def test_a_header_that_could_not_be_sent_as_one_is_refused(headers: dict[str, object]) -> None:
    assert reason_of({"custom_headers": headers}) == "invalid_param_value"
    assert reason_of({"custom_headers": json.dumps(headers)}) == "invalid_param_value"


@pytest.mark.parametrize(
    "name",
    [
        "Transfer-Encoding",
        "connection",
        "HOST",
        "Content-Length",
        "Keep-Alive",
        "TE",
        "Trailer",
        "Upgrade",
        "Proxy-Authorization",
        "proxy-connection",
    ],
)
def test_connection_headers_cannot_be_set_by_the_caller(name: str) -> None:
    assert reason_of({"custom_headers": {name: "x"}}) == "invalid_param_value"


@pytest.mark.parametrize("text", ["", "[]", "5", "null", "{", '{"a":', "[" * 100_000, "\ud800"])
def test_text_that_is_no_object_of_headers_is_refused(text: str) -> None:
    assert reason_of({"custom_headers": text}) == "invalid_param_value"


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=12), max_size=3))
def test_accepted_headers_contain_no_line_break(headers: dict[str, str]) -> None:
    try:
        checked = check_params({"custom_headers": dict(headers)}).headers
    except InvalidParam:
        return

    assert checked == headers
    for name, value in headers.items():
        assert not {"\r", "\n", "\x00"} & set(name + value)
        f"{name}: {value}".encode("latin-1")


@pytest.mark.parametrize("text", ["", "404", "404,500", " 404 , 500", ",".join(["404"] * 50), 404])
def test_lists_of_statuses_are_accepted(text: object) -> None:
    assert check_params({"allowed_status_codes": text}).values["allowed_status_codes"] == str(text)


@pytest.mark.parametrize(
    "text",
    [
        "9" * 5000,
        "4040",
        "40",
        "404,",
        ",404",
        "404;500",
        "\uff14\uff10\uff14",
        "-04",
        "4e2",
        "\r\n",
        True,
        10**40,
        ",".join(["404"] * 51),
    ],
    ids=lambda text: repr(text)[:20],
)
def test_text_that_is_no_list_of_statuses_is_refused(text: object) -> None:
    assert reason_of({"allowed_status_codes": text}) == "invalid_param_value"


@pytest.mark.parametrize("key", sorted(PARAMS))
def test_a_huge_number_is_refused_as_an_invalid_value(key: str) -> None:
    assert reason_of({key: 10**5000}) == "invalid_param_value"


@pytest.mark.parametrize("key", sorted(PARAMS))
def test_each_parameter_is_either_supported_or_refused_by_a_direct_fetch(key: str) -> None:
    plain = {"allowed_status_codes", "custom_headers", "original_status"} | CONDITIONS

    assert DIRECT_SUPPORT.find_unsupported({key: "auto"}) == ([] if key in plain else [key])
    value = "markdown" if key == "response_type" else "auto"
    assert EXTRACTING_SUPPORT.find_unsupported({key: value}) == (
        [] if key in plain | EXTRACTING else [key]
    )
    assert REMOTE_SUPPORT.find_unsupported({key: "auto"}) == []


def test_a_direct_fetch_makes_no_pdf() -> None:
    assert EXTRACTING_SUPPORT.find_unsupported({"response_type": "pdf"}) == ["response_type"]
    assert EXTRACTING_SUPPORT.find_unsupported({"response_type": "markdown"}) == []


@pytest.mark.parametrize(
    ("params", "key"),
    [
        ({"css_extractor": "h1"}, "css_extractor"),
        ({"css_extractor": '["h1"]'}, "css_extractor"),
        ({"css_extractor": '{"a": 1}'}, "css_extractor"),
        ({"css_extractor": '{"a": "h1", "a": "h2"}'}, "css_extractor"),
        ({"css_extractor": '{"a": "bad"}'}, "css_extractor"),
        ({"outputs": "emails,nonsense"}, "outputs"),
        ({"autoparse": "maybe"}, "autoparse"),
        ({"autoparse": "true", "outputs": "links"}, "autoparse"),
        ({"css_extractor": '{"a": "h1"}', "response_type": "markdown"}, "css_extractor"),
    ],
)
def test_an_extraction_that_cannot_work_is_refused_at_submission(
    params: dict[str, str], key: str
) -> None:
    with pytest.raises(InvalidParam) as caught:
        EXTRACTING_SUPPORT.check(params)

    assert (caught.value.reason, caught.value.key) == ("invalid_param_value", key)


def test_a_line_may_not_add_a_second_extraction_to_that_of_its_job() -> None:
    job = {"css_extractor": '{"a": "h1"}'}

    with pytest.raises(InvalidParam, match=r"^outputs cannot be combined with css_extractor"):
        EXTRACTING_SUPPORT.check({"outputs": "links"}, job)
    EXTRACTING_SUPPORT.check({"outputs": "links", "css_extractor": ""}, job)
    EXTRACTING_SUPPORT.check({}, job)


def test_extraction_without_its_packages_is_refused_with_what_to_install() -> None:
    with pytest.raises(InvalidParam, match=r"^outputs needs `pip install 'conveyor\[gateway\]'`"):
        DIRECT_SUPPORT.check({"outputs": "links"})


@pytest.mark.parametrize("value", ["false", "False", "0", ""])
def test_a_parameter_that_is_off_is_accepted_without_a_gateway(value: str) -> None:
    DIRECT_SUPPORT.check({"js_render": value, "premium_proxy": value})


@pytest.mark.parametrize(
    ("params", "remedy"),
    [
        ({"wait_for": "h1"}, "wait_for needs js_render=true."),
        ({"response_type": "pdf"}, "response_type=pdf needs js_render=true."),
        ({"premium_proxy": "true"}, "premium_proxy needs a gateway with such proxies"),
        ({"session_id": "7"}, "session_id needs a gateway with such proxies"),
        ({"extract": "auto"}, "extract needs the hosted service"),
    ],
)
def test_with_a_local_browser_the_remedy_names_the_missing_parameter(
    params: dict[str, str], remedy: str
) -> None:
    support = replace(DIRECT_SUPPORT, rendering=GatewaySupport(frozenset(OWN_PARAMS)))

    with pytest.raises(InvalidParam, match=f"^{remedy}"):
        support.check(params)


def test_a_refused_parameter_is_named_with_the_remedy() -> None:
    with pytest.raises(InvalidParam, match=r"^js_render needs a gateway .*CONVEYOR_GATEWAY_URL"):
        DIRECT_SUPPORT.check({"js_render": "true"})
