"""Query parameters that several tables of routes share."""

from __future__ import annotations

from conveyor.api.route import Parameter
from conveyor.domain import limits

CURSOR = Parameter(
    "cursor", {"type": "string", "minLength": 1}, "The `next_cursor` of the page before."
)
LIMIT = Parameter(
    "limit",
    {"type": "integer", "minimum": 1, "maximum": limits.LIST_ROWS_MAX, "default": limits.LIST_ROWS},
    "How many to answer with at most.",
)
