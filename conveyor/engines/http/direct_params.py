"""The scraper parameters that mean something without a browser or a proxy fleet."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Each of these changes what the caller gets; pretending to honour one would be a lie.
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
    """The parameters that a direct fetch cannot honour; those switched off do not count."""
    if not params:
        return []
    return sorted(
        name for name in RESULT_PARAMS & params.keys() if params[name].lower() not in _OFF
    )


def allowed_statuses(params: Mapping[str, str]) -> frozenset[int]:
    """The statuses that count as a page, from a list such as `404,500`."""
    text = params.get("allowed_status_codes")
    if not text:
        return frozenset()
    words = (word.strip() for word in text.split(","))
    # Rows of earlier versions may hold anything.
    return frozenset(int(word) for word in words if _STATUS.match(word))
