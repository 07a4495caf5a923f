"""Crawls over HTTP: create, show, list, stop, and read the kept pages (docs/crawls.md)."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from functools import partial

import msgspec

from conveyor.api.jobs import params_from, webhook_input_from
from conveyor.api.results import body_headers, log_damage_while_sending, logging_damage
from conveyor.api.route import CURSOR, Command, Example, Parameter, Query, Route, make_handler
from conveyor.api.runs import STORAGE_QUOTAS
from conveyor.api.server.request import Download, RequestContext, Response, Work, json_reply
from conveyor.domain import limits, queries
from conveyor.domain.changes import JobKey, RunKey
from conveyor.domain.crawl.urls import normalize
from conveyor.domain.crawl_record import Crawl, CrawlRules
from conveyor.domain.errors import InvalidArgument, NotFound, Refused, ResultDamaged, ResultExpired
from conveyor.domain.ids import JobId
from conveyor.domain.lifecycle import CRAWL_LIVE, JOB_VISIBLE
from conveyor.domain.model import JobType, Task
from conveyor.domain.queries import JobsOf
from conveyor.domain.quota import Quota, QuotaExceeded
from conveyor.domain.submit.scraper_params import Params, content_type_for, extension_for
from conveyor.domain.submit.target import BadUrl, parse_url
from conveyor.schemas.crawl import (
    CrawlDownloadLine,
    CrawlPageResponse,
    CrawlResponse,
    CreateCrawlRequest,
    ListCrawlsResponse,
    StopCrawlResponse,
    crawl_page_view,
    crawl_result_view,
    crawl_view,
    decode_create,
    rules_from,
    stop_view,
)
from conveyor.schemas.requests import cap_from, host_limits_from
from conveyor.usecases import crawl as crawls
from conveyor.usecases import webhook as webhooks
from conveyor.usecases.lookup import load_task
from conveyor.usecases.run import results
from conveyor.usecases.run.results import ResultExpiry, owner_scope
from conveyor.usecases.submit.jobs import Submission

# A download has every page of a crawl, so it may take hours. It still ends, so that a client that
# reads slowly does not hold a connection for ever.
_DOWNLOAD_S = 6 * 3600
_POSITION = re.compile(r"(\d{1,12})\.(\d{1,6})\Z")
_START = "0.0"
# Kept pages that a download reads at a time.
_DOWNLOAD_ROWS = 100


class TooManyCrawls(Refused):
    """The caller has as many open jobs, live runs or stored pages as it may."""

    status = 429
    code = "too_many_crawls"
    title = "Too many crawls"


class ContentNotFound(NotFound):
    """The crawl has no such page, or none with a content."""

    code = "content_not_found"


def create(call: RequestContext) -> Work:
    request = decode_create(call.body)
    _check_start(call, request.url)
    params = params_from(call.env, _page_params(request))
    rules = rules_from(request, params.values)
    assert call.principal is not None
    submission = Submission(
        is_open=True,
        name=request.url[: limits.NAME_CHARS_MAX],
        params=Params({}, params.headers),
        webhook=webhook_input_from(call.env, request.webhook),
        budget=cap_from(request.budget) if request.budget else None,
        host_limits=host_limits_from(request.host_limits),
        api_key=call.principal.forwarded_key,
    )
    return partial(_create, call, request.url, rules, submission)


def _check_start(call: RequestContext, url: str) -> None:
    target, policy = parse_url(url), call.env.config.targets
    detail = None
    if isinstance(target, BadUrl):
        detail = f"The start page cannot be fetched: {target.detail}."
    elif policy is not None and policy.forbids_target(target) is not None:
        detail = "The start page cannot be fetched: its host may not be reached."
    elif normalize(url) is None:
        detail = "The start page is no page."
    if detail is not None:
        raise InvalidArgument(detail, pointer="/url", code="invalid_start_url")


def _page_params(request: CreateCrawlRequest) -> dict[str, object]:
    params = dict(request.zenrows_params or {})
    if "response_type" in params:
        raise InvalidArgument(
            "Choose the form of the pages with output_format, instead of response_type.",
            pointer="/zenrows_params/response_type",
        )
    is_markdown = request.output_format == "markdown"
    return {**params, "response_type": "markdown"} if is_markdown else params


async def _create(
    call: RequestContext, url: str, rules: CrawlRules, submission: Submission, job_id: str
) -> Response:
    if submission.webhook is not None:
        await webhooks.validate_new(
            call.env, call.api.notifier, call.caller, submission.webhook, JobId(job_id)
        )
    stored = (Quota.LIVE_RUNS, Quota.OPEN_JOBS, *STORAGE_QUOTAS)
    find_existing = partial(call.env.store.read, JobKey(JobId(job_id)))
    try:
        async with call.api.storage.admit(
            call.caller, stored, find_existing, bytes_sent=call.sent.size_bytes
        ):
            crawl = await crawls.create(
                call.env, call.caller, url, rules, submission, job_id=job_id
            )
    except QuotaExceeded as error:
        raise TooManyCrawls(error.detail, retry_after_s=error.retry_after_s) from error
    return json_reply(crawl_view(crawl), 201)


async def get(call: RequestContext) -> Response:
    limit = call.limit(default=limits.CRAWL_ROWS, limit_max=limits.CRAWL_ROWS_MAX)
    crawl = await crawls.own(call.env, call.caller, call.ids["crawl_id"])
    scope = owner_scope(call.caller, f"crawl|{crawl.job_id}")
    sign = partial(call.env.secret_box.sign, purpose="cursor")
    cursor = call.parameter("cursor")
    text = _START if cursor is None else queries.read_cursor(cursor, scope=scope, sign=sign)
    match = _POSITION.match(text)
    assert match is not None, "a signed position is one of ours"
    async with call.api.requests.turn_to_page(call.caller):
        tasks, step, skip = await crawls.load_kept_pages(
            call.env, crawl, step=int(match[1]), skip=int(match[2]), limit=limit
        )
    expiries = await _expiries(call, crawl)
    views = [crawl_result_view(crawl, task, is_expired=expiries.is_over(task)) for task in tasks]
    is_last = crawl.status not in CRAWL_LIVE and len(tasks) < limit
    position = queries.make_cursor(f"{step}.{skip}", scope=scope, sign=sign)
    return json_reply(crawl_page_view(crawl, views, None if is_last else position))


async def _expiries(call: RequestContext, crawl: Crawl) -> ResultExpiry:
    run = await call.env.store.read(RunKey(crawl.job_id, crawl.run_id))
    if run is None:
        raise crawls.CrawlNotFound(crawls.NO_CRAWL)
    return await results.expiries_of(call.env, run)


async def list_crawls(call: RequestContext) -> Response:
    limit = call.limit(default=limits.CRAWLS_LISTED, limit_max=limits.LIST_ROWS_MAX)
    scope = owner_scope(call.caller, "crawls")
    sign = partial(call.env.secret_box.sign, purpose="cursor")
    cursor = call.parameter("cursor")
    before = None if cursor is None else queries.read_cursor(cursor, scope=scope, sign=sign)
    query = JobsOf(
        caller=call.caller,
        statuses=JOB_VISIBLE,
        type=JobType.CRAWL,
        before=None if before is None else JobId(before),
        limit=limit + 1,
    )
    jobs = await call.env.store.find(query)
    rows = [await crawls.of_job(call.env, job.job_id) for job in jobs[:limit]]
    views = [crawl_view(crawl) for crawl in rows if crawl is not None]
    if len(jobs) <= limit:
        return json_reply(ListCrawlsResponse(crawls=views))
    next_cursor = queries.make_cursor(jobs[limit - 1].job_id, scope=scope, sign=sign)
    return json_reply(ListCrawlsResponse(crawls=views, next_cursor=next_cursor))


async def stop(call: RequestContext, _: str) -> Response:
    crawl = await crawls.stop(call.env, call.caller, call.ids["crawl_id"])
    return json_reply(stop_view(crawl))


async def get_content(call: RequestContext) -> Download:
    call.flag("download")  # The page is a file to save in any case.
    crawl = await crawls.own(call.env, call.caller, call.ids["crawl_id"])
    absent = ContentNotFound("The crawl has no such content.")
    run = await call.env.store.read(RunKey(crawl.job_id, crawl.run_id))
    if run is None or crawl.rules.output is None:
        raise absent
    try:
        task = await load_task(call.env, run, call.ids["content_id"])
    except NotFound:
        raise absent from None
    if task.result is None:
        raise absent
    results.refuse_expired(await results.expiries_of(call.env, run), task)
    content_type = content_type_for(crawl.rules.output, task.result)
    name = f"{task.task_id}.{extension_for(content_type)}"
    fields = {"job": run.job_id, "task": task.task_id, "blob": task.result.key}
    with logging_damage(fields):
        pieces = await results.body_of(call.env, task.result)
    headers = body_headers(task.result, content_type, name)
    return Download(log_damage_while_sending(pieces, fields), headers)


async def download(call: RequestContext) -> Download:
    crawl = await crawls.own(call.env, call.caller, call.ids["crawl_id"])
    expiries = await _expiries(call, crawl)
    headers = {
        "Content-Type": "application/x-ndjson",
        "Content-Disposition": f'attachment; filename="{crawl.job_id}.ndjson"',
        "X-Crawl-Status": crawl.status.value,
    }
    return Download(_lines(call, crawl, expiries), headers, timeout_s=_DOWNLOAD_S)


async def _lines(
    call: RequestContext, crawl: Crawl, expiries: ResultExpiry
) -> AsyncGenerator[bytes, None]:
    step = skip = 0
    while True:
        tasks, step, skip = await crawls.load_kept_pages(
            call.env, crawl, step=step, skip=skip, limit=_DOWNLOAD_ROWS
        )
        for task in tasks:
            view = crawl_result_view(crawl, task, is_expired=expiries.is_over(task))
            content = await _text_of(call, task) if view.content_url else None
            line = CrawlDownloadLine(
                url=view.url, content_status=view.content_status, content=content
            )
            yield msgspec.json.encode(line) + b"\n"
        if len(tasks) < _DOWNLOAD_ROWS:
            return


async def _text_of(call: RequestContext, task: Task) -> str | None:
    assert task.result is not None
    try:
        with logging_damage({"task": task.task_id, "blob": task.result.key}):
            pieces = await results.body_of(call.env, task.result)
            return b"".join([piece async for piece in pieces]).decode(errors="replace")
    except (NotFound, ResultDamaged, ResultExpired):
        return None


_CRAWL = "/v1/crawls/{crawl_id}"
_LIMIT = Parameter(
    "limit",
    {
        "type": "integer",
        "minimum": 1,
        "maximum": limits.LIST_ROWS_MAX,
        "default": limits.CRAWLS_LISTED,
    },
    "The largest number of crawls in the response.",
)
_RESULTS = Parameter(
    "limit",
    {
        "type": "integer",
        "minimum": 1,
        "maximum": limits.CRAWL_ROWS_MAX,
        "default": limits.CRAWL_ROWS,
    },
    "The largest number of results in the response.",
)
_DOWNLOAD = Parameter(
    "download", {"type": "boolean", "default": False}, "Accepted for older clients."
)

ROUTES: tuple[Route, ...] = (
    Route(
        method="POST",
        path="/v1/crawls",
        name="createCrawl",
        tag="crawls",
        summary="Start a crawl of a site",
        description=(
            "Starts from one page, follows links and sitemaps within the site, and keeps the pages "
            "whose URLs match. It runs as an open job of the same id, which feeds itself."
        ),
        example=Example(body={"url": "https://shop.example/", "depth": 2, "max_pages": 1000}),
        does=Command(create, CreateCrawlRequest),
        answers={201: CrawlResponse},
        gives={"crawl_id": "/crawl_id"},
    ),
    Route(
        method="GET",
        path="/v1/crawls",
        name="listCrawls",
        tag="crawls",
        summary="List crawls, newest first",
        description="Lists the crawls of the caller, without the pages that they kept.",
        does=Query(list_crawls),
        answers={200: ListCrawlsResponse},
        query=(CURSOR, _LIMIT),
    ),
    Route(
        method="GET",
        path=_CRAWL,
        name="getCrawl",
        tag="crawls",
        summary="Show a crawl, and the pages that it kept",
        description=(
            "Shows how far a crawl has got, and a page of its results in the order in which they "
            "were kept. While it runs, `next_cursor` leads to those that were kept since."
        ),
        does=Query(get),
        answers={200: CrawlPageResponse},
        query=(CURSOR, _RESULTS),
    ),
    Route(
        method="POST",
        path=_CRAWL + "/stop",
        name="stopCrawl",
        tag="crawls",
        summary="Stop a crawl",
        description="Stops a running crawl and its job. One that has ended stays as it ended.",
        does=Command(make_handler(stop)),
        answers={200: StopCrawlResponse},
    ),
    Route(
        method="GET",
        path=_CRAWL + "/contents/{content_id}",
        name="getCrawlContent",
        tag="crawls",
        summary="Download a kept page",
        description="Returns the body of a page, if the crawl has an output format.",
        does=Query(get_content),
        answers={200: "*/*"},
        problems=(410,),
        query=(_DOWNLOAD,),
    ),
    Route(
        method="GET",
        path=_CRAWL + "/download",
        name="downloadCrawl",
        tag="crawls",
        summary="Download all kept pages as NDJSON",
        description=(
            "Returns one line per kept page, with its content if the crawl has an output format. "
            "`X-Crawl-Status` is the state of the crawl when the download began."
        ),
        does=Query(download),
        answers={200: "*/*"},
    ),
)
