"""Finds tasks by reason, host and text, shows one task, and the figures of each host
(docs/api.md, Results)."""

from __future__ import annotations

from conveyor.api.route import Parameter
from conveyor.api.server.request import RequestContext
from conveyor.domain import limits
from conveyor.domain.errors import InvalidArgument
from conveyor.domain.model import FailureReason
from conveyor.schemas.responses import HostResponse
from conveyor.usecases.run.task_search import HostFigures, TaskFilter


def filter_from(call: RequestContext) -> TaskFilter:
    reason, host, text = (call.parameter(name) for name in ("reason", "host", "text"))
    order = call.parameter("order")
    if reason is not None and reason not in set(FailureReason):
        raise InvalidArgument(
            f"reason must be one of {', '.join(FailureReason)}.", pointer="/reason"
        )
    if order not in {None, "id", "list"}:
        raise InvalidArgument("order must be id or list.", pointer="/order")
    return TaskFilter(
        reason=None if reason is None else FailureReason(reason),
        host=None if host is None else host.lower(),
        text=None if text is None else text.lower(),
        in_list_order=order == "list",
    )


def host_view(each: HostFigures) -> HostResponse:
    return HostResponse(
        host=each.host,
        total=each.total,
        successful=each.successful,
        failed=each.failed,
        inflight=each.inflight,
        bytes=each.bytes,
        credits=each.credits,
        failure_reasons=dict(each.reasons),
        median_s=None if each.median_s is None else round(each.median_s, 3),
    )


FILTERS = (
    Parameter(
        "reason",
        {"type": "string", "enum": list(FailureReason)},
        "Only tasks that failed for this reason. With this or the next filters a page may be "
        "short; only a missing `next_cursor` means that nothing is left.",
    ),
    Parameter("host", {"type": "string"}, "Only tasks of this host."),
    Parameter("text", {"type": "string"}, "Only tasks whose URL contains this text."),
    Parameter(
        "order",
        {"type": "string", "enum": ["id", "list"], "default": "id"},
        f"`list`: in the order of the submitted list; for up to {limits.ORDERED_ROWS_MAX:,} tasks.",
    ),
)
