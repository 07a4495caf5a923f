"""Every public name of the batch client of the unmodified SDK, each with a function that uses it.

A function is called with a server and asserts what it needs. The names are read from the
package, so the test fails for a release with a new method until a function here uses it."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime

from zenrows.batch import (
    At,
    BatchAPIError,
    Calendar,
    CurrentRun,
    ExportHandle,
    ExportRef,
    JobHandle,
    JobRef,
    Rate,
    RunHandle,
    RunRef,
    ScheduleControls,
    Weekly,
    ZenRowsBatchClient,
)

from tests.contract.server import PAGES, QUICK, ContractServer, ids, is_whole_zip

SURFACE = (
    ZenRowsBatchClient,
    JobRef,
    JobHandle,
    CurrentRun,
    RunRef,
    RunHandle,
    ExportRef,
    ExportHandle,
    ScheduleControls,
)
Use = Callable[[ContractServer], None]
TABLE: dict[str, Use] = {}


def public_names() -> set[str]:
    return {
        f"{kind.__name__}.{name}"
        for kind in SURFACE
        for name in vars(kind)
        if not name.startswith("_")
    }


def uses(*names: str) -> Callable[[Use], Use]:
    def register(use: Use) -> Use:
        TABLE.update(dict.fromkeys(names, use))
        return use

    return register


def names_of(use: Use) -> list[str]:
    return [name for name, other_use in TABLE.items() if other_use is use]


@uses("ZenRowsBatchClient.close", "ZenRowsBatchClient.base_url")
def _(server: ContractServer) -> None:
    client = ZenRowsBatchClient(server.other_key, base_url=server.client.base_url)
    assert list(client.iter_jobs()) == []
    client.close()


@uses("ZenRowsBatchClient.submit_job", "JobRef.accepted_tasks", "JobRef.status")
def _(server: ContractServer) -> None:
    body = {"tasks": [{"url": url} for url in server.urls[:2]], "type": "regular"}
    job = server.client.submit_job(body, idempotency_key="once", wait_for_ingest=True)
    again = server.client.submit_job(body, idempotency_key="once")
    assert job.job_id == again.job_id
    assert job.accepted_tasks == 2
    assert job.status.value == "closed"


@uses("ZenRowsBatchClient.submit_regular")
def _(server: ContractServer) -> None:
    urls = [{"url": server.urls[0], "external_id": "first", "metadata": {"a": "b"}}]
    job = server.client.submit_regular(urls, name="one", external_id="mine", metadata={"k": "v"})
    job.run.wait(**QUICK)
    (row,) = job.run.results()
    assert (row.external_id, row.status.value, row.metadata["a"]) == ("first", "successful", "b")
    assert job.load().data.external_id == "mine"


@uses("ZenRowsBatchClient.submit_open", "JobRef.add_tasks", "JobRef.close")
def _(server: ContractServer) -> None:
    job = server.client.submit_open(server.urls[:1])
    body = {"tasks": [{"url": server.urls[1]}]}
    first = job.add_tasks(body, idempotency_key="add")
    assert job.add_tasks(body, idempotency_key="add") == first
    assert job.close().status.value == "closed"
    assert job.run.wait(**QUICK).stats.total == 2


@uses("ZenRowsBatchClient.submit_scheduled")
def _(server: ContractServer) -> None:
    weekly = Calendar(["09:00", "18:00"], Weekly(["mon", "fri"]), "Europe/Berlin")
    for schedule in (At(datetime(2090, 9, 1, 9, 0), "Europe/Berlin"), Rate(15, "minute"), weekly):  # noqa: DTZ001
        job = server.client.submit_scheduled(schedule, server.urls[:1])
        assert job.load().data.type.value == "scheduled"
        job.delete()


@uses("ZenRowsBatchClient.get_job", "ZenRowsBatchClient.job", "JobRef.load", "JobHandle.status")
def _(server: ContractServer) -> None:
    job = server.client.get_job(server.job.job_id)
    assert job.data == server.client.job(server.job.job_id).load().data
    assert job.status.value == "closed"


@uses("ZenRowsBatchClient.estimate_cost")
def _(server: ContractServer) -> None:
    assert server.client.estimate_cost({"tasks": [{"url": server.urls[0]}]}).max > 0


@uses("ZenRowsBatchClient.list_jobs", "ZenRowsBatchClient.iter_jobs")
def _(server: ContractServer) -> None:
    newest = [server.an_open_job().job_id for _ in range(2)][::-1]
    page = server.client.list_jobs(limit=1, job_type="regular", status="open")
    assert [job.job_id for job in page.jobs] == newest[:1]
    seen = ids(server.client.iter_jobs(status="open", page_size=1), "job_id")
    assert seen >= set(newest)
    for job_id in newest:
        server.client.job(job_id).delete()


@uses(
    "ZenRowsBatchClient.get_run",
    "ZenRowsBatchClient.run",
    "RunRef.load",
    "RunHandle.status",
    "RunHandle.stats",
)
def _(server: ContractServer) -> None:
    run = server.client.get_run(server.job.job_id, run_id=server.run.run_id)
    assert run.data == server.client.run(server.job.job_id, server.run.run_id).load().data
    assert run.status.value == "completed"
    assert (run.stats.total, run.stats.successful, run.stats.failed) == (PAGES + 1, PAGES, 1)


@uses("ZenRowsBatchClient.list_runs", "ZenRowsBatchClient.iter_runs", "JobRef.runs")
def _(server: ContractServer) -> None:
    (run,) = server.client.list_runs(server.job.job_id, limit=5).runs
    assert [
        listed_run.run_id for listed_run in server.client.iter_runs(server.job.job_id, page_size=1)
    ] == [run.run_id]
    assert [listed_run.run_id for listed_run in server.job.runs(page_size=1)] == [run.run_id]


@uses("ZenRowsBatchClient.list_results", "ZenRowsBatchClient.iter_results")
def _(server: ContractServer) -> None:
    job_id, run_id = server.job.job_id, server.run.run_id
    page = server.client.list_results(job_id, run_id=run_id, status="failed")
    assert [row.error.code for row in page.results] != []
    rows = list(server.client.iter_results(job_id))
    assert len(ids(rows, "task_id")) == len(rows) == PAGES + 1


@uses("ZenRowsBatchClient.wait_for_run", "RunRef.wait", "CurrentRun.wait")
def _(server: ContractServer) -> None:
    job = server.client.submit_regular(server.urls[:1])
    assert server.client.wait_for_run(job.job_id, **QUICK).status.value == "completed"
    assert job.run.wait(**QUICK).wait(**QUICK).status.value == "completed"


@uses("ZenRowsBatchClient.create_job_input")
def _(server: ContractServer) -> None:
    spec = {"type": "csv", "csv": {"header": True, "fields": {"url": "link"}}}
    slot = server.client.create_job_input(spec)
    assert slot.upload.method == "PUT"
    assert slot.file_input_id


@uses("ZenRowsBatchClient.upload_csv", "JobRef.add_file_input")
def _(server: ContractServer) -> None:
    text = "name;link\r\n" + "".join(f"'n{i}';'{url}'\r\n" for i, url in enumerate(server.urls[:3]))
    fields = {"url": "link", "external_id": "name"}
    options = {"header": True, "delimiter": ";", "quote": "'"}
    for upload in (server.client.upload_csv, server.job.add_file_input):
        slot = upload(io.BytesIO(text.encode()), fields=fields, **options)
        job = server.client.submit_regular(file_input_id=slot, wait_for_ingest=True)
        job.run.wait(**QUICK)
        rows = list(job.run.results())
        assert ids(rows, "external_id") == {"n0", "n1", "n2"}
        assert {str(row.url) for row in rows} == set(server.urls[:3])


@uses("JobRef.wait_for_ingest")
def _(server: ContractServer) -> None:
    urls = [f"{server.urls[0]}?{number}" for number in range(12)]
    job = server.client.submit_regular(urls)
    assert job.wait_for_ingest(timeout=60, poll_interval=0.05).data.latest_run.stats.total == 12
    job.delete()


@uses(
    "ZenRowsBatchClient.get_job_webhook",
    "ZenRowsBatchClient.put_job_webhook",
    "ZenRowsBatchClient.delete_job_webhook",
)
def _(server: ContractServer) -> None:
    job_id = server.job.job_id
    config = {"url": server.receiver, "signature": False}
    server.client.put_job_webhook(job_id, config)
    assert str(server.client.get_job_webhook(job_id).url) == server.receiver
    server.client.delete_job_webhook(job_id)
    server.client.delete_job_webhook(job_id)
    assert not server.has_a_webhook(server.job)


@uses("JobRef.get_webhook", "JobRef.set_webhook", "JobRef.delete_webhook")
def _(server: ContractServer) -> None:
    server.job.set_webhook(server.receiver, signature=False)
    assert server.has_a_webhook(server.job)
    server.job.delete_webhook()
    assert not server.has_a_webhook(server.job)


@uses("ZenRowsBatchClient.test_webhook")
def _(server: ContractServer) -> None:
    assert server.client.test_webhook({"url": server.receiver}).delivered


@uses(
    "ZenRowsBatchClient.list_hmac_keys",
    "ZenRowsBatchClient.rotate_hmac_key",
    "ZenRowsBatchClient.finalize_hmac_key",
    "ZenRowsBatchClient.cancel_hmac_rotation",
)
def _(server: ContractServer) -> None:
    client = server.without_keys_in_rotation()
    before = client.list_hmac_keys().active.kid
    dropped = client.rotate_hmac_key()
    client.cancel_hmac_rotation()
    candidate = client.rotate_hmac_key()
    assert client.list_hmac_keys().candidate.kid == candidate.kid != dropped.kid
    assert client.list_hmac_keys().active.kid == before
    client.finalize_hmac_key()
    assert client.list_hmac_keys().active.kid == candidate.kid


@uses(
    "ZenRowsBatchClient.start_results_export",
    "ZenRowsBatchClient.get_results_export",
    "ZenRowsBatchClient.wait_for_export",
)
def _(server: ContractServer) -> None:
    job_id, run_id = server.job.job_id, server.run.run_id
    export_id = server.client.start_results_export(job_id, run_id).export_id
    done = server.client.wait_for_export(job_id, run_id, export_id, **QUICK)
    assert done.status.value == "completed"
    again = server.client.get_results_export(job_id, run_id, export_id)
    assert again.data.download_url


@uses("ZenRowsBatchClient.download_all_results")
def _(server: ContractServer) -> None:
    target = server.a_path("client.zip")
    server.client.download_all_results(
        server.job.job_id, server.run.run_id, target, wait_timeout=60, poll_interval=0.05
    )
    assert is_whole_zip(target)


@uses("RunRef.download_all_results", "CurrentRun.download_all_results")
def _(server: ContractServer) -> None:
    for number, run in enumerate((server.run, server.job.run)):
        target = server.a_path(f"run-{number}.zip")
        run.download_all_results(target, wait_timeout=60, poll_interval=0.05)
        assert is_whole_zip(target)


@uses("RunRef.start_export", "CurrentRun.start_export", "RunRef.export")
def _(server: ContractServer) -> None:
    for run in (server.run, server.job.run):
        started = run.start_export()
        done = server.run.export(started.export_id).wait(timeout=60, poll_interval=0.05)
        assert done.status.value == "completed"


@uses("ExportRef.load", "ExportRef.wait", "ExportRef.download_to_path", "ExportHandle.status")
def _(server: ContractServer) -> None:
    assert server.export.load().status == server.export.status
    assert is_whole_zip(server.export.download_to_path(server.a_path("export.zip")))


@uses("JobRef.delete")
def _(server: ContractServer) -> None:
    job = server.an_open_job()
    job.delete()
    job.delete()
    with suppress(BatchAPIError):
        raise AssertionError(f"a deleted job is there: {job.load()}")


@uses("JobRef.rerun", "JobRef.retry_failed", "RunRef.delete")
def _(server: ContractServer) -> None:
    job = server.a_job()
    first = next(iter(job.runs()))
    whole = job.rerun(idempotency_key="again", wait_for_ingest=True).wait(**QUICK)
    assert whole.stats.total == PAGES + 1
    failed = job.retry_failed(include_pending=True, wait_for_ingest=True).wait(**QUICK)
    assert failed.stats.total == PAGES + 1
    inherited = [row for row in failed.results() if row.source_run_id == whole.run_id]
    assert len(inherited) == PAGES
    first.delete()
    assert ids(job.runs(), "run_id") == {whole.run_id, failed.run_id}


@uses("JobRef.run", "CurrentRun.load", "CurrentRun.pause", "CurrentRun.resume", "CurrentRun.stop")
def _(server: ContractServer) -> None:
    job = server.an_open_job()
    assert job.run.pause().data.pause_state.value == "paused"
    assert job.run.resume().data.pause_state is None
    assert job.run.stop().status.value == "stopped"
    assert job.run.load().status.value == "stopped"


@uses("CurrentRun.cancel")
def _(server: ContractServer) -> None:
    assert server.an_open_job().run.cancel().status.value == "stopped"


@uses("RunRef.results", "CurrentRun.results", "RunRef.task_history", "CurrentRun.task_history")
def _(server: ContractServer) -> None:
    for run in (server.run, server.job.run):
        rows = list(run.results(status="successful"))
        assert len(rows) == PAGES
        assert run.task_history(rows[0].task_id).events != []


@uses("RunRef.download_to_dir", "CurrentRun.download_to_dir")
def _(server: ContractServer) -> None:
    for number, run in enumerate((server.run, server.job.run)):
        folder = server.a_path(f"bodies-{number}")
        assert run.download_to_dir(folder, concurrency=2) == PAGES
        assert len(list(folder.iterdir())) == PAGES


@uses("RunRef.download_to_memory", "CurrentRun.download_to_memory")
def _(server: ContractServer) -> None:
    for run in (server.run, server.job.run):
        bodies = run.download_to_memory(concurrency=2)
        assert len(bodies) == PAGES


@uses(
    "RunRef.download_task_to_file",
    "CurrentRun.download_task_to_file",
    "RunRef.download_task_to_memory",
    "CurrentRun.download_task_to_memory",
)
def _(server: ContractServer) -> None:
    for number, run in enumerate((server.run, server.job.run)):
        target = server.a_path(f"body-{number}")
        run.download_task_to_file(server.page, target)
        assert target.read_bytes() == run.download_task_to_memory(server.page)
        assert b"<h1>Page" in target.read_bytes()


@uses(
    "JobRef.schedule",
    "ScheduleControls.pause",
    "ScheduleControls.resume",
    "ScheduleControls.update",
)
def _(server: ContractServer) -> None:
    job = server.a_scheduled_job()
    assert job.schedule.pause().data.schedule_state.value == "paused"
    assert job.schedule.resume().data.schedule_state.value == "active"
    assert job.schedule.update(Rate(every=2, unit="hour")).data.schedule.rate.every == 2
    fired = job.rerun().wait(**QUICK)
    assert fired.status.value == "completed"
    job.delete()
