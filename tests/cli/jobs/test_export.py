"""`conveyor jobs export` and `verify` against a real server."""

from __future__ import annotations

import zipfile

import botocore.session
import pytest

from conveyor.cli.demo import Site
from conveyor.domain.export_record import ExportFormat
from tests.cli.jobs.test_jobs import MISSING, finished, submit, told
from tests.cli.program import Program
from tests.servers import ACCESS_KEY, SECRET_KEY

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ExportFormat)
def test_an_export_is_saved_and_checked(caller: Program, site: Site, kind: ExportFormat) -> None:
    job_id = finished(caller, site, 0, 1, MISSING)
    name = f"out.{kind}"

    saved = told(caller.run("jobs", "export", job_id, "--format", kind, "-o", name, "--json"))
    checked = caller.run("jobs", "verify", name)

    assert saved["manifest"]["counts"] == {"successful": 2, "failed": 1}
    assert checked.code == 0
    assert "is whole: 3 tasks (1 failed, 2 successful)" in checked.out


def test_without_a_name_the_archive_is_called_after_its_run(caller: Program, site: Site) -> None:
    job_id = finished(caller, site, 0)

    ended = caller.run("jobs", "export", job_id)

    assert ended.code == 0
    (path,) = caller.folder.glob("*.zip")
    assert path.name in ended.out
    assert "Exporting: 1 of 1 done" in ended.err
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_a_damaged_file_is_told_of(caller: Program, site: Site) -> None:
    job_id = finished(caller, site, 0)
    caller.run("jobs", "export", job_id, "-o", "out.zip")
    path = caller.folder / "out.zip"
    path.write_bytes(path.read_bytes().replace(b"PK\1\2", b"PK\1\3", 1))

    ended = caller.run("jobs", "verify", "out.zip")

    assert ended.code == 2
    assert "out.zip cannot be read as an export" in ended.err


def test_the_server_puts_the_file_into_a_bucket(caller: Program, site: Site, moto: str) -> None:
    s3 = botocore.session.Session().create_client(
        "s3",
        endpoint_url=moto,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
    )
    s3.create_bucket(Bucket="for-the-caller")
    job_id = finished(caller, site, 0, 1)
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    to = ("--to", "s3://for-the-caller/of a day/pages.parquet", "--endpoint", moto)

    ended = caller.run("jobs", "export", job_id, "--format", "parquet", *to, "--json", **keys)

    response = told(ended)
    assert response["destination"].endswith("/for-the-caller/of%20a%20day/pages.parquet")
    assert SECRET_KEY not in ended.out + ended.err
    found = s3.get_object(Bucket="for-the-caller", Key="of a day/pages.parquet")
    path = caller.folder / "pages.parquet"
    path.write_bytes(found["Body"].read())
    assert "2 tasks" in caller.run("jobs", "verify", "pages.parquet").out


def test_a_bucket_without_keys_is_refused(caller: Program) -> None:
    ended = caller.run("jobs", "export", "0" * 26, "--to", "s3://bucket/key")

    assert ended.code == 2
    assert "AWS_ACCESS_KEY_ID" in ended.err


def test_a_run_that_lives_on_cannot_be_exported(caller: Program, site: Site) -> None:
    job_id = submit(caller, site, 0, options=("--open",))

    ended = caller.run("jobs", "export", job_id)

    assert ended.code == 2
    assert "has not ended" in ended.err


def test_a_place_that_cannot_be_written_to_is_named(caller: Program, site: Site) -> None:
    job_id = finished(caller, site, 0)

    ended = caller.run("jobs", "export", job_id, "-o", "no/such/folder/out.zip")

    assert ended.code == 2
    assert "Cannot write to" in ended.err
