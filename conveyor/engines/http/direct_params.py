"""Scraper parameters that a direct fetch can honour, and those that it must refuse
(docs/engines.md, Gateways)."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Each of these changes the result, and needs a browser, a proxy or a parser. A task with one of
# them fails: ignoring it would return another page than the caller asked for.
RESULT_PARAMS = frozenset(
    {
        "autoparse",
        "css_extractor",
        "js_instructions",
        "js_render",
        "json_response",
        "outputs",
        "premium_proxy",
        "proxy_country",
        "response_type",
    }
)
_STATUS = re.compile(r"[0-9]{3}\Z")
_OFF = frozenset({"", "false", "0"})


def unsupported_params(params: Mapping[str, str]) -> list[str]:
    """Returns the parameters that a direct fetch cannot honour, without those switched off."""
    if not params:
        return []
    return sorted(
        name for name in RESULT_PARAMS & params.keys() if params[name].lower() not in _OFF
    )


def allowed_statuses(params: Mapping[str, str]) -> frozenset[int]:
    """Returns the statuses that count as a page, from a list such as `404,500`."""
    text = params.get("allowed_status_codes")
    if not text:
        return frozenset()
    words = (word.strip() for word in text.split(","))
    # Earlier releases stored the text unchecked, so invalid words are ignored.
    return frozenset(int(word) for word in words if _STATUS.match(word))
