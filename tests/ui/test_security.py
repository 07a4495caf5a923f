"""What no visitor may see, do or be made to do, on every page, form and stream.

The tests use the route tables of the dashboard, so that they cover a new page or form at once."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from urllib.parse import quote

import pytest

from conveyor.logs import JsonFormatter
from conveyor.ports.webhook_sender import NotDelivered
from conveyor.ui.dashboard import FORMS, VIEWS
from conveyor.usecases import export as exports
from conveyor.usecases import webhook
from tests.api.world import ANNA, BERT, World
from tests.ui.world import ADMIN, WATCH, Answer, Browser, make_ui_world

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{7*7}}"
RECEIVER_TOKEN = "s3cret-of-the-receiver"
HEADER_VALUE = "secret-header-value"
OF_A_JOB = sorted(pattern for pattern in VIEWS if "<string:job_id>" in pattern)
FORMS_OF_A_JOB = sorted(pattern for pattern in FORMS if "<string:job_id>" in pattern)
PREVIEW = next(pattern for pattern in VIEWS if pattern.endswith("/preview"))
FILES = {pattern for pattern in VIEWS if pattern.endswith(("/content", "/file"))}
SEARCHES = (
    "/ui/jobs?q={name}",
    "/ui/jobs?q={external_id}",
    "/ui/jobs?show=failed",
    "/ui/jobs?show=scheduled",
    "/ui/jobs?caller={caller}",
    "/ui/webhooks",
    "/ui/schedules",
    "/ui/system",
    "/ui/",
)
FIELDS = {
    "budget_credits": "5",
    "do": "submit",
    "event_id": "0" * 26,
    "host": "example.com",
    "host_rate": "1",
    "state": "paused",
    "url": "https://hooks.example/x",
    "urls": "https://example.com/1",
}


@dataclass(frozen=True, slots=True)
class ShownJob:
    """A job that has content for every page."""

    job_id: str
    run_id: str
    task_id: str
    export_id: str
    scheduled_id: str

    def path(self, pattern: str) -> str:
        return "/ui" + re.sub(r"<string:(\w+)>", lambda found: getattr(self, found[1]), pattern)


async def a_job_to_show(world: World, key: str, text: str = "plain") -> ShownJob:
    """An ended run with a failure, an attempted delivery and an export, and a scheduled job. `text`
    is used in every field that a caller, a site or a receiver can write."""
    # The text in the form that the API accepts in a URL.
    in_a_url = re.sub(r"[\s\"\\{}]", "", text)
    body = {
        "name": text,
        "external_id": re.sub(r"[^\w.-]", "", text),
        "metadata": {"k": text, text[:32]: "v"},
        "webhook": {"url": f"https://hooks.example/x?token={RECEIVER_TOKEN}"},
        "zenrows_params": {"custom_headers": {"X-Secret": HEADER_VALUE}},
        "tasks": [
            {"url": f"https://example.com/?q={in_a_url}", "metadata": {"k": text}},
            {"url": "https://example.com/2"},
        ],
    }
    answer = await world.post("/v1/jobs", body, key=key)
    assert answer.status == 201, answer.body
    submitted = answer.json
    job_id, run_id = submitted["job_id"], submitted["latest_run"]["run_id"]
    first, second = await world.tasks_of(job_id, run_id)
    await world.succeed(job_id, first, b"<script>alert(1)</script>")
    await world.fail(job_id, second, text)
    world.receiver.outcome = NotDelivered(f"transport_error:{text}")
    for notice in await webhook.due(world.env, limit=9):
        if ready := await webhook.prepare(world.env, notice):
            await webhook.deliver(world.env, world.receiver, ready)
    started = await world.post(f"/v1/jobs/{job_id}/runs/{run_id}/exports?format=jsonl", key=key)
    for export in await exports.due(world.env, limit=9):
        await exports.process(world.env, export)
    schedule = {"cron": "0 4 * * *", "timezone": "UTC"}
    scheduled = {**body, "type": "scheduled", "schedule": schedule}
    scheduled_id = (await world.post("/v1/jobs", scheduled, key=key)).json["job_id"]
    return ShownJob(job_id, run_id, first.task_id, started.json["export_id"], scheduled_id)


async def visitor(world: World, key: str, **fields: str) -> Browser:
    browser = Browser(world)
    assert (await browser.sign_in(key, **fields)).status == 303
    return browser


async def every_page(browser: Browser, shown: ShownJob) -> dict[str, Answer]:
    """Every page about this job, and the pages that list it."""
    paths = [shown.path(pattern) for pattern in sorted(VIEWS)]
    paths += [
        f"/ui/webhooks?job={shown.job_id}",
        f"/ui/jobs/{shown.job_id}/runs/{shown.run_id}?export={shown.export_id}",
        f"/ui/jobs/{shown.scheduled_id}",
        *(search.format(name="plain", external_id="plain", caller="x") for search in SEARCHES),
    ]
    return {path: await browser.open(path) for path in paths}


# Tenancy.


@pytest.mark.parametrize("pattern", OF_A_JOB)
async def test_no_page_and_no_stream_shows_another_callers_job(
    world: World, anna: Browser, pattern: str
) -> None:
    path = (await a_job_to_show(world, BERT)).path(pattern)

    page = await anna.open(path)
    stream = await anna.open(f"/ui/live?page={quote(path)}")

    assert (page.status, stream.status) == (404, 404)
    nothing = await anna.open("/ui/jobs/01ARZ3NDEKTSV4RRFFQ69G5FAV")
    assert words_without_ids(page) == words_without_ids(nothing)


def words_without_ids(answer: Answer) -> str:
    return re.sub(r"[0-9A-Z]{26}", "", answer.words)


@pytest.mark.parametrize("pattern", FORMS_OF_A_JOB)
async def test_no_form_changes_another_callers_job(
    world: World, anna: Browser, pattern: str
) -> None:
    shown = await a_job_to_show(world, BERT)
    before = (await world.get(f"/v1/jobs/{shown.job_id}", key=BERT)).json
    await anna.open("/ui/")

    answer = await anna.send(shown.path(pattern), FIELDS)

    assert answer.status == 404
    assert (await world.get(f"/v1/jobs/{shown.job_id}", key=BERT)).json == before


async def test_no_search_finds_another_callers_job(world: World, anna: Browser) -> None:
    shown = await a_job_to_show(world, BERT, "berts-own-name")
    caller = (await world.run(shown.job_id, shown.run_id)).caller

    for search in SEARCHES:
        path = search.format(name="berts-own", external_id="berts-own-name", caller=caller)
        page = await anna.open(path)
        assert page.status == 200, path
        for secret in (shown.job_id, shown.scheduled_id, shown.run_id):
            assert secret not in page.text, path
        # The search field repeats the search text.
        assert ">berts-own-name<" not in page.text, path
    for path in (
        f"/ui/webhooks?job={shown.job_id}",
        f"/ui/live?page=/ui/webhooks?job={shown.job_id}",
    ):
        assert (await anna.open(path)).status == 404, path


async def test_an_export_of_another_run_is_not_shown(world: World, anna: Browser) -> None:
    hers, his = await a_job_to_show(world, ANNA), await a_job_to_show(world, BERT)
    run = f"/ui/jobs/{hers.job_id}/runs/{hers.run_id}"

    page = await anna.open(f"{run}?export={his.export_id}")
    file = await anna.open(f"{run}/exports/{his.export_id}/file")

    assert "Export as" not in page.words
    assert file.status == 404


# Forms.


@pytest.mark.parametrize("pattern", sorted(FORMS))
async def test_no_form_works_without_its_token_or_as_a_link(
    world: World, anna: Browser, pattern: str
) -> None:
    shown = await a_job_to_show(world, ANNA)
    path = shown.path(pattern)
    await anna.open("/ui/")
    count = len((await world.get("/v1/jobs")).json["jobs"])

    token, anna.token = anna.token, ""
    without = await anna.send(path, FIELDS)
    anna.token, anna.more["Sec-Fetch-Site"] = token, "cross-site"
    from_elsewhere = await anna.send(path, FIELDS)
    as_link = await anna.open(path) if pattern not in VIEWS else None

    assert (without.status, from_elsewhere.status) == (403, 403)
    assert as_link is None or as_link.status == 404
    assert len((await world.get("/v1/jobs")).json["jobs"]) == count


@pytest.mark.parametrize("pattern", sorted(FORMS))
@pytest.mark.parametrize(("key", "fields"), [(ANNA, {"read_only": "on"}), (WATCH, {})])
async def test_a_form_of_a_read_only_visitor_is_refused(
    world: World, pattern: str, key: str, fields: dict[str, str]
) -> None:
    shown = await a_job_to_show(world, ANNA)
    browser = await visitor(world, key, **fields)
    await browser.open("/ui/")

    answer = await browser.send(shown.path(pattern), FIELDS)

    assert answer.status == 403
    assert "This session is read-only." in answer.words


@pytest.mark.parametrize(("key", "fields"), [(ANNA, {"read_only": "on"}), (WATCH, {})])
async def test_a_read_only_visitor_sees_no_form(
    world: World, key: str, fields: dict[str, str]
) -> None:
    shown = await a_job_to_show(world, ANNA)
    browser = await visitor(world, key, **fields)

    for path, page in (await every_page(browser, shown)).items():
        forms = re.findall(r'<form method="post" action="([^"]+)"', page.text)
        assert set(forms) <= {"/ui/signout"}, path


# What a page can make the browser do.


@dataclass(slots=True)
class Reader(HTMLParser):
    """Collects everything in a page that a browser would run or load."""

    suspects: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        HTMLParser.__init__(self)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        is_own_script = tag == "script" and str(values.get("src")).startswith("/ui/static/")
        if tag in {"script", "style", "object", "embed", "base", "img"} and not is_own_script:
            self.suspects.append(f"<{tag}>")
        for name, value in attrs:
            if name.startswith("on") or name in {"style", "srcdoc", "formaction", "http-equiv"}:
                self.suspects.append(f"{tag} {name}")
            is_address = name in {"href", "src", "action", "data"}
            if is_address and not re.match(r"/(?!/)|#", value or ""):
                self.suspects.append(f"{tag} {name}={value}")


async def test_no_text_of_a_caller_site_or_receiver_becomes_markup(world: World) -> None:
    shown = await a_job_to_show(world, ANNA, HOSTILE)
    anna = await visitor(world, ANNA)
    pages = await every_page(anna, shown)
    for search in (f"/ui/jobs?q={quote(HOSTILE)}", f"/ui/nothing/{quote(HOSTILE)}"):
        pages[search] = await anna.open(search)
    tasks = shown.path("/jobs/<string:job_id>/runs/<string:run_id>/tasks")
    pages["filters"] = await anna.open(f"{tasks}?text={quote(HOSTILE)}&host={quote(HOSTILE)}")
    await anna.open("/ui/")
    for pattern in sorted(FORMS):
        fields = dict.fromkeys(FIELDS, HOSTILE) | {"once": "1", "cron": HOSTILE, "name": HOSTILE}
        if "delete" not in pattern:
            pages[f"POST {pattern}"] = await anna.send(shown.path(pattern), fields)

    shown_in = [path for path, page in pages.items() if "alert(1)" in page.words]
    assert len(shown_in) > 10
    for path, page in pages.items():
        is_page = page.headers["Content-Type"].startswith("text/html")
        if not is_page or path.endswith(("/preview", "/content")):
            continue
        reader = Reader()
        reader.feed(page.text)
        assert reader.suspects == [], path
        assert "49" not in re.findall(r"onerror=alert\(2\)&gt;(\d+)", page.text), path


async def test_every_page_forbids_frames_and_content_of_other_sites(world: World) -> None:
    shown = await a_job_to_show(world, ANNA)
    anna = await visitor(world, ANNA)
    pages = await every_page(anna, shown)
    pages["/ui/signin"] = await Browser(world).open("/ui/signin")
    pages["error"] = await anna.open("/ui/nothing")

    for path, page in pages.items():
        headers = page.headers
        assert headers["X-Content-Type-Options"] == "nosniff", path
        if any(path == shown.path(pattern) for pattern in FILES):
            assert headers["Content-Disposition"].startswith("attachment"), path
        elif path == shown.path(PREVIEW):
            assert headers["Content-Security-Policy"].startswith("sandbox; default-src 'none'")
            assert "frame-ancestors 'self'" in headers["Content-Security-Policy"]
        elif page.status == 200:
            assert "default-src 'self'" in headers["Content-Security-Policy"], path
            assert "frame-ancestors 'none'" in headers["Content-Security-Policy"], path
            assert headers["X-Frame-Options"] == "DENY", path


# Keys and sessions.


async def test_an_api_key_is_in_no_page_address_or_log(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    shown = await a_job_to_show(world, ANNA)
    anna = await visitor(world, ANNA)
    pages = await every_page(anna, shown)
    for pattern in sorted(FORMS, key=lambda form: "delete" in form):
        pages[f"POST {pattern}"] = await anna.send(shown.path(pattern), FIELDS)
    wrong = Browser(world)
    await wrong.open("/ui/signin")
    pages["wrong"] = await wrong.send("/ui/signin", {"key": f"{ANNA} and more"})

    for path, page in pages.items():
        assert ANNA not in page.text, path
        assert ANNA not in str(page.headers), path
        assert HEADER_VALUE not in page.text, path
    lines = "\n".join(JsonFormatter().format(record) for record in caplog.records)
    assert lines
    assert ANNA not in lines
    assert HEADER_VALUE not in lines


async def test_an_operator_sees_no_key_and_no_token_of_a_caller(world: World) -> None:
    made = await world.post("/v1/hmac/keys/rotate", key=ANNA)
    shown = await a_job_to_show(world, ANNA)
    operator = await visitor(world, ADMIN)

    for path, page in (await every_page(operator, shown)).items():
        if path not in {shown.path(pattern) for pattern in FILES}:
            for secret in (ANNA, made.json["secret"], HEADER_VALUE, RECEIVER_TOKEN):
                assert secret not in page.text, path
    for pattern in sorted(form for form in FORMS if form.startswith("/webhooks/")):
        assert (await operator.send(shown.path(pattern), FIELDS)).status == 403, pattern


async def test_the_operators_key_is_not_an_api_key(world: World) -> None:
    """An operator acts through the pages only and cannot submit jobs."""
    operator = await visitor(world, ADMIN)
    await operator.open("/ui/")

    assert (await operator.send("/ui/jobs/new", FIELDS)).status == 403


async def test_a_session_planted_by_another_visitor_is_replaced_at_sign_in() -> None:
    """The caller Bert plants his own session in Anna's browser. After her sign-in that session is
    invalid there, and neither his cookie nor his token gives access to her jobs."""
    world = make_ui_world()
    bert = await visitor(world, BERT)
    await bert.open("/ui/")
    anna = Browser(world, cookie=bert.cookie)
    await anna.open("/ui/signin")
    shown = await a_job_to_show(world, ANNA)

    page = await anna.open("/ui/system")
    anna.token = bert.token
    await anna.send("/ui/signin", {"key": ANNA, "next": "/ui/"})

    assert page.status == 200
    assert anna.cookie != bert.cookie
    job = f"/ui/jobs/{shown.job_id}"
    assert ((await anna.open(job)).status, (await bert.open(job)).status) == (200, 404)
    anna.token = bert.token
    assert (await anna.send(f"{job}/delete")).status == 403
