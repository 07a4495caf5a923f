"""Sign-in, sessions, roles and CSRF tokens: every visitor sees and does only what its role
allows."""

from __future__ import annotations

import pytest

from conveyor.api.server.auth import KeyList
from conveyor.ui.access import SESSION_S, AccessRules
from tests.api.world import ANNA, BERT, SECRET, World
from tests.ui.world import ADMIN, WATCH, Browser, make_ui_world

PAGES = ("/ui/", "/ui/jobs", "/ui/jobs/new", "/ui/schedules", "/ui/webhooks", "/ui/system")
OPEN = AccessRules(is_open_on_loopback=True)


def local(world: World, **fields: object) -> Browser:
    values = {"peer": "127.0.0.1", "host": "localhost:8080", **fields}
    return Browser(world, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", PAGES)
async def test_a_visitor_without_a_key_is_sent_to_the_sign_in_page(world: World, path: str) -> None:
    answer = await Browser(world).open(path)

    assert answer.status == 303
    assert answer.location.startswith("/ui/signin?next=/ui/")


async def test_signing_in_returns_to_the_requested_page(world: World) -> None:
    browser = Browser(world)
    await browser.open("/ui/signin?next=/ui/jobs")

    answer = await browser.send("/ui/signin", {"key": ANNA, "next": "/ui/jobs"})

    assert (answer.status, answer.location) == (303, "/ui/jobs")
    assert (await browser.open("/ui/jobs")).status == 200


@pytest.mark.parametrize("target", ["//evil.example/", "https://evil.example/", "/ui/\\evil", "x"])
async def test_signing_in_never_redirects_to_another_site(world: World, target: str) -> None:
    browser = Browser(world)
    await browser.open("/ui/signin")

    answer = await browser.send("/ui/signin", {"key": ANNA, "next": target})

    assert answer.location == "/ui/"


async def test_the_cookie_is_encrypted_and_not_readable_by_scripts_or_other_sites(
    world: World,
) -> None:
    answer = await Browser(world).sign_in()

    cookie = answer.headers["Set-Cookie"]
    assert ANNA not in cookie
    assert {"HttpOnly", "SameSite=Strict", "Path=/ui"} <= set(cookie.split("; "))


async def test_signing_in_creates_a_new_session(world: World) -> None:
    """A cookie that was planted before the sign-in is invalid after it."""
    browser = Browser(world)
    await browser.open("/ui/signin")
    planted, token = browser.cookie, browser.token

    await browser.sign_in()

    assert browser.cookie != planted
    assert (await Browser(world, cookie=planted).open("/ui/")).status == 303
    stale = Browser(world, cookie=browser.cookie, token=token)
    assert (await stale.send("/ui/signout")).status == 403


async def test_signing_out_removes_the_cookie(world: World, anna: Browser) -> None:
    await anna.open("/ui/")

    answer = await anna.send("/ui/signout")

    assert (answer.status, answer.location, anna.cookie) == (303, "/ui/signin", None)


async def test_a_session_ends_after_its_time(world: World, anna: Browser) -> None:
    world.clock.advance(SESSION_S + 1)

    assert (await anna.open("/ui/")).status == 303


async def test_a_changed_cookie_is_no_session(world: World, anna: Browser) -> None:
    assert anna.cookie is not None
    anna.cookie = anna.cookie[:-2] + ("AA" if anna.cookie[-2:] != "AA" else "BB")

    assert (await anna.open("/ui/")).status == 303


async def test_a_revoked_key_ends_its_sessions() -> None:
    keys = [KeyList.of([ANNA, BERT], secret=SECRET)]

    class Changing:
        def identify(self, api_key: str):  # type: ignore[no-untyped-def]
            return keys[0].identify(api_key)

        def lets_in(self, caller):  # type: ignore[no-untyped-def]
            return keys[0].lets_in(caller)

    world = make_ui_world(auth=Changing())
    browser = Browser(world)
    await browser.sign_in()
    assert (await browser.open("/ui/")).status == 200

    keys[0] = KeyList.of([BERT], secret=SECRET)

    assert (await browser.open("/ui/")).status == 303


async def test_an_unknown_key_is_refused_with_a_reason() -> None:
    world = make_ui_world(auth=KeyList.of([BERT], secret=SECRET))

    answer = await Browser(world).sign_in("not-a-key")

    assert answer.status == 401
    assert "The API key is not known here." in answer.words


@pytest.mark.parametrize("token", ["", "guessed"])
async def test_a_form_without_its_token_does_nothing(
    world: World, anna: Browser, token: str
) -> None:
    submitted = await world.submit()
    await anna.open("/ui/")
    anna.token = token

    answer = await anna.send(f"/ui/jobs/{submitted['job_id']}/pause")

    assert answer.status == 403
    run = await world.run(submitted["job_id"], submitted["latest_run"]["run_id"])
    assert run.pause_state == "active"


async def test_a_token_of_another_session_does_nothing(world: World, anna: Browser) -> None:
    submitted = await world.submit()
    bert = Browser(world)
    await bert.sign_in(BERT)
    await bert.open("/ui/")
    await anna.open("/ui/")
    anna.token = bert.token

    assert (await anna.send(f"/ui/jobs/{submitted['job_id']}/stop")).status == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site", "none"])
async def test_a_form_of_another_site_does_nothing(world: World, anna: Browser, site: str) -> None:
    submitted = await world.submit()
    await anna.open("/ui/")
    anna.more["Sec-Fetch-Site"] = site

    assert (await anna.send(f"/ui/jobs/{submitted['job_id']}/pause")).status == 403


async def test_a_link_changes_nothing(world: World, anna: Browser) -> None:
    submitted = await world.submit()

    assert (await anna.open(f"/ui/jobs/{submitted['job_id']}/pause")).status == 404


async def test_a_read_only_session_changes_nothing(world: World) -> None:
    submitted = await world.submit()
    browser = Browser(world)
    await browser.sign_in(read_only="on")
    page = await browser.open(
        f"/ui/jobs/{submitted['job_id']}/runs/{submitted['latest_run']['run_id']}"
    )

    answer = await browser.send(f"/ui/jobs/{submitted['job_id']}/pause")

    assert page.status == 200
    assert "Pause" not in page.words
    assert answer.status == 403
    assert "read-only" in answer.words


async def test_an_operator_sees_and_stops_the_jobs_of_all_callers(world: World) -> None:
    jobs = [await world.submit(key=key, name=f"job of {key[:4]}") for key in (ANNA, BERT)]
    operator = Browser(world)
    await operator.sign_in(ADMIN)

    page = await operator.open("/ui/jobs")
    answers = [await operator.send(f"/ui/jobs/{job['job_id']}/pause") for job in jobs]

    assert "job of anna" in page.words
    assert "job of bert" in page.words
    assert [answer.status for answer in answers] == [303, 303]


async def test_an_operator_sees_no_key_of_a_caller(world: World) -> None:
    submitted = await world.submit(key=ANNA)
    operator = Browser(world)
    await operator.sign_in(ADMIN)
    base = f"/ui/jobs/{submitted['job_id']}"

    for path in ("/ui/", "/ui/jobs", base, f"{base}/runs/{submitted['latest_run']['run_id']}"):
        assert ANNA not in (await operator.open(path)).text
    assert (await operator.send("/ui/webhooks/keys/rotate")).status == 403


async def test_the_read_only_admin_key_shows_all_jobs_and_changes_none(world: World) -> None:
    submitted = await world.submit(key=BERT, name="of bert")
    watcher = Browser(world)
    await watcher.sign_in(WATCH)

    page = await watcher.open("/ui/jobs")
    answer = await watcher.send(f"/ui/jobs/{submitted['job_id']}/stop")

    assert "of bert" in page.words
    assert answer.status == 403


async def test_in_development_a_visitor_on_loopback_needs_no_key() -> None:
    browser = local(make_ui_world(rules=OPEN))

    answer = await browser.open("/ui/")

    assert answer.status == 200
    assert "Sign out" not in answer.words


@pytest.mark.parametrize(
    "changed",
    [
        {"peer": "203.0.113.9"},
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example:8080"},
        {"more": {"X-Forwarded-For": "203.0.113.9"}},
        {"more": {"Forwarded": "for=203.0.113.9"}},
    ],
    ids=["from another machine", "rebound name", "similar name", "proxy", "newer proxy"],
)
async def test_only_visitors_on_this_machine_need_no_key(changed: dict[str, object]) -> None:
    browser = local(make_ui_world(rules=OPEN), **changed)

    assert (await browser.open("/ui/")).status == 303


async def test_a_server_not_in_development_requires_a_key_on_loopback_too(world: World) -> None:
    assert (await local(world).open("/ui/")).status == 303


async def test_the_key_appears_in_no_page_and_no_address(world: World, anna: Browser) -> None:
    submitted = await world.submit(name="mine")
    base = f"/ui/jobs/{submitted['job_id']}"

    for path in (*PAGES, base, f"{base}/runs/{submitted['latest_run']['run_id']}"):
        answer = await anna.open(path)
        assert ANNA not in answer.text
        assert ANNA not in str(answer.headers)
    refused = await anna.send("/ui/signin", {"key": "", "next": "/ui/"})
    assert ANNA not in refused.text
