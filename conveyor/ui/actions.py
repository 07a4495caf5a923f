"""What the forms of the dashboard do. Each handler performs one operation of the API."""

from __future__ import annotations

from typing import Any

from conveyor.domain.errors import InvalidTasks, Refused
from conveyor.ui.client import LocalClient, RepeatedRefusal
from conveyor.ui.pages import load_run, new_job_values
from conveyor.ui.visit import Page, Redirect, Visit

_NEW_JOB = "new_job.html"
# Fields of the form that are numbers in the API.
_NUMBERS = ("max_inflight", "max_attempts", "priority", "result_ttl_days")

# Refusals that name invalid lines of a list.
_ABOUT_LINES = (InvalidTasks, RepeatedRefusal)


async def pause(visit: Visit) -> Redirect:
    return await _change_run(visit, "pauseJob", "paused")


async def resume(visit: Visit) -> Redirect:
    return await _change_run(visit, "resumeJob", "resumed")


async def _change_run(visit: Visit, operation: str, done: str) -> Redirect:
    client = await visit.client_for(visit.ids["job_id"])
    run = await client.do(operation, visit.ids)
    return Redirect(f"/ui/jobs/{run.job_id}/runs/{run.run_id}?done={done}")


async def stop(visit: Visit) -> Page:
    """Answers with the receipt, which is not stored."""
    client = await visit.client_for(visit.ids["job_id"])
    run = await client.do("stopJob", visit.ids)
    job = await client.get("getJob", visit.ids)
    return Page("receipt.html", {"job": job, "run": run, "receipt": run.receipt})


async def close(visit: Visit) -> Redirect:
    client = await visit.client_for(visit.ids["job_id"])
    await client.do("closeJob", visit.ids)
    return Redirect(f"/ui/jobs/{visit.ids['job_id']}?done=closed")


async def rerun(visit: Visit) -> Redirect:
    """Reruns all tasks, or those that the form selects."""
    client = await visit.client_for(visit.ids["job_id"])
    chosen = {name: text for name in ("status", "reason", "host") if (text := visit.field(name))}
    started = await client.do("rerunJob", visit.ids, once=visit.field("once") or None, **chosen)
    return Redirect(f"/ui/jobs/{started.job_id}/runs/{started.latest_run.run_id}?done=rerun")


async def set_budget(visit: Visit) -> Redirect:
    client = await visit.client_for(visit.ids["job_id"])
    await client.do("setJobBudget", visit.ids, body=_budget_from(visit))
    return Redirect(f"/ui/jobs/{visit.ids['job_id']}?done=budget")


def _budget_from(visit: Visit) -> dict[str, Any] | None:
    spent = visit.field("budget_credits"), visit.field("budget_cost")
    budget: dict[str, Any] = {}
    if spent[0]:
        budget["credits"] = _number(spent[0])
    if spent[1]:
        budget["cost"] = spent[1]
    return budget or None


async def set_host_limit(visit: Visit) -> Redirect:
    """Changes the limit of one host, or of every host if none is named."""
    client = await visit.client_for(visit.ids["job_id"])
    job = await client.get("getJob", visit.ids)
    host_limits: dict[str, Any] = {"hosts": {}}
    if job.host_limits is not None:
        host_limits = {
            "concurrency": job.host_limits.concurrency,
            "rate_per_s": job.host_limits.rate_per_s,
            "hosts": {
                name: {"concurrency": host_limit.concurrency, "rate_per_s": host_limit.rate_per_s}
                for name, host_limit in job.host_limits.hosts.items()
            },
        }
    limit = _limit_from(visit)
    host = visit.field("host")
    if not host:
        host_limits |= {"concurrency": None, "rate_per_s": None, **limit}
    elif limit:
        host_limits["hosts"][host] = limit
    else:
        host_limits["hosts"].pop(host, None)
    is_empty = not any(host_limits.values())
    if is_empty:
        await client.do("deleteJobHostLimits", visit.ids)
    else:
        await client.do("setJobHostLimits", visit.ids, body=host_limits)
    back = visit.field("back")
    is_own = back.startswith("/ui/jobs/") and back.isprintable()
    return Redirect(back if is_own else f"/ui/jobs/{visit.ids['job_id']}?done=host_limits")


def _limit_from(visit: Visit) -> dict[str, Any]:
    limit: dict[str, Any] = {}
    if text := visit.field("host_concurrency"):
        limit["concurrency"] = _number(text)
    if text := visit.field("host_rate"):
        limit["rate_per_s"] = _number(text)
    return limit


async def delete_job(visit: Visit) -> Redirect:
    client = await visit.client_for(visit.ids["job_id"])
    await client.do("deleteJob", visit.ids)
    return Redirect("/ui/jobs")


async def delete_run(visit: Visit) -> Redirect:
    client = await visit.client_for(visit.ids["job_id"])
    await client.do("deleteJobRun", visit.ids)
    return Redirect(f"/ui/jobs/{visit.ids['job_id']}")


async def audit(visit: Visit) -> Page:
    client, values = await load_run(visit)
    return Page("audit.html", {**values, "audit": await client.get("auditJobRun", visit.ids)})


async def start_export(visit: Visit) -> Redirect:
    client = await visit.client_for(visit.ids["job_id"])
    started = await client.do(
        "startResultsExport",
        visit.ids,
        once=visit.field("once") or None,
        format=visit.field("format") or None,
    )
    ids = visit.ids
    return Redirect(f"/ui/jobs/{ids['job_id']}/runs/{ids['run_id']}?export={started.export_id}")


async def set_schedule_state(visit: Visit) -> Redirect:
    client = await visit.client_for(visit.ids["job_id"])
    state = visit.field("state")
    await client.do("updateScheduleState", visit.ids, body={"schedule_state": state})
    return Redirect(f"/ui/schedules?done=schedule_{'paused' if state == 'paused' else 'resumed'}")


async def submit_job(visit: Visit) -> Page | Redirect:
    """Checks the list with a dry run, or submits it. A refusal shows the form again."""
    client = visit.own()
    values = new_job_values(visit)
    filled = {name: values[0] for name, values in visit.form.items() if name != "token"}
    filled["urls"] = _urls_from(visit)
    values["filled"] = filled
    try:
        body = _job_from(visit, filled["urls"])
        if visit.field("do") == "submit":
            return await _submit(client, body, visit.field("once"))
        checked = await client.do("submitJob", body=body, dry_run="true")
    except Refused as error:
        lines = error.invalid_tasks if isinstance(error, _ABOUT_LINES) else ()
        return Page(_NEW_JOB, {**values, "error": error, "lines": lines}, error.status)
    return Page(_NEW_JOB, {**values, "checked": checked})


async def _submit(client: LocalClient, body: dict[str, Any], once: str) -> Redirect:
    job = await client.do("submitJob", body=body, once=once or None)
    if job.latest_run is None:
        return Redirect(f"/ui/jobs/{job.job_id}?done=scheduled")
    return Redirect(f"/ui/jobs/{job.job_id}/runs/{job.latest_run.run_id}?done=submitted")


def _urls_from(visit: Visit) -> str:
    """The pasted lines, then those of the uploaded file."""
    pasted = visit.field("urls")
    uploaded = visit.files.get("file", b"").decode("utf-8", errors="replace").strip()
    return "\n".join(text for text in (pasted, uploaded) if text)


def _job_from(visit: Visit, urls: str) -> dict[str, Any]:
    lines = [line.strip() for line in urls.splitlines()]
    body: dict[str, Any] = {
        # As in a list for `conveyor scrape`.
        "tasks": [{"url": line} for line in lines if line and not line.startswith("#")],
        "on_invalid": "skip" if visit.field("skip_invalid") else "reject",
    }
    for name in ("name", "external_id"):
        if text := visit.field(name):
            body[name] = text
    for name in _NUMBERS:
        if text := visit.field(name):
            body[name] = _number(text)
    if params := _params_from(visit.field("params")):
        body["zenrows_params"] = params
    if budget := _budget_from(visit):
        body["budget"] = budget
    if limit := _limit_from(visit):
        body["host_limits"] = limit
    if url := visit.field("webhook"):
        body["webhook"] = {"url": url, "signature": bool(visit.field("signature"))}
    if cron := visit.field("cron"):
        body["type"] = "scheduled"
        body["schedule"] = {"cron": cron, "timezone": visit.field("timezone") or "UTC"}
    return body


def _params_from(text: str) -> dict[str, str]:
    """One parameter a line, as `name=value`."""
    pairs = (line.partition("=") for line in text.splitlines() if line.strip())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _number(text: str) -> float | str:
    """A number for the API, which refuses any other text with its own words."""
    try:
        value = float(text)
    except ValueError:
        return text
    return int(value) if value.is_integer() else value
