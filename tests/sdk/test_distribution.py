"""The distribution of the client alone, beside the server or without it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from clients.python.collect import collect
from conveyor import sdk
from conveyor.cli.demo import Site
from tests.tidy.sources import ROOT

CLIENT = ROOT / "clients/python"
DEPENDENCIES_MAX = 6
USE = """
import asyncio, sys
from pathlib import Path
import trio
from conveyor_client import AsyncioClient, Client, TrioClient, __version__

server, folder, *urls = sys.argv[1:]

async def use(kind):
    async with kind(server, kind.__name__) as client:
        job = await client.submit(urls)
        await client.wait(job.job_id)
        tasks = [task.task_id async for task in client.as_completed(job.job_id)]
        saved = await client.download_all(
            job.job_id, {task: Path(folder, kind.__name__ + task) for task in tasks}
        )
        return sum(body.size_bytes for body in saved.values())

with Client(server, "sync") as client:
    job = client.submit(urls)
    client.wait(job.job_id)
    tasks = [task.task_id for task in client.results(job.job_id)]
    saved = client.download_all(job.job_id, {task: Path(folder, task) for task in tasks})
sizes = {
    sum(body.size_bytes for body in saved.values()),
    trio.run(use, TrioClient),
    asyncio.run(use(AsyncioClient)),
}
assert len(sizes) == 1, sizes
assert "conveyor" not in sys.modules, "it has modules of the server"
print(__version__)
"""


def _run(*command: str | Path, **environ: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    if "Could not find a version" in done.stderr and not os.environ.get("CI"):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_distribution_has_the_names_of_the_sdk_and_nothing_of_the_server(
    tmp_path: Path,
) -> None:
    collect(ROOT, tmp_path)
    names = (
        "import conveyor_client, sys; print(*conveyor_client.__all__, 'conveyor' in sys.modules)"
    )

    # The server's packages, which may be installed in this environment, are not on the path.
    *seen, has_server = _run(sys.executable, "-c", names, PYTHONPATH=str(tmp_path)).split()

    # Installed beside the server, neither package hides or replaces the other.
    both = "import conveyor.sdk as a, conveyor_client as b; print(a.TaskInput is b.TaskInput)"
    assert _run(sys.executable, "-c", both, PYTHONPATH=str(tmp_path)) == "False\n"
    folders = {path.name for path in (tmp_path / "conveyor_client/internal/conveyor").iterdir()}
    assert seen == sdk.__all__
    assert has_server == "False"
    assert folders.isdisjoint({"api", "bootstrap", "cli", "engines", "ui", "usecases"})


def test_the_distribution_requires_few_packages_and_all_that_it_imports(tmp_path: Path) -> None:
    collect(ROOT, tmp_path)
    project = tomllib.loads((CLIENT / "pyproject.toml").read_text())["project"]
    imported = {
        match[1]
        for path in tmp_path.rglob("*.py")
        for match in re.finditer(r"^(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
    }

    assert len(project["dependencies"]) <= DEPENDENCIES_MAX
    assert imported - sys.stdlib_module_names - {"conveyor_client"} == set(project["dependencies"])


@pytest.mark.slow
def test_the_distribution_installs_into_an_empty_environment_and_works(
    tmp_path: Path, server: str, site: Site
) -> None:
    # The build runs in a copy, because it leaves files beside its sources.
    for folder in ("clients", "conveyor", "actors"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    python = tmp_path / "environment/bin/python"
    _run(sys.executable, "-m", "venv", python.parent.parent)
    begun = time.monotonic()

    install = (python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet")
    _run(*install, "-c", ROOT / "constraints.txt", tmp_path / "clients/python")
    took_s = time.monotonic() - begun

    listed = json.loads(_run(python, "-m", "pip", "list", "--format", "json"))
    packages = {package["name"] for package in listed} - {"pip", "setuptools"}
    print(f"{len(packages)} packages in {took_s:.1f} s: {', '.join(sorted(packages))}")
    (tmp_path / "pages").mkdir()
    version = _run(python, "-c", USE, server, tmp_path / "pages", *site.urls(3))
    assert version.strip() == "0.1.0"
    assert "conveyor" not in packages
    owned = "import importlib.metadata as m; print(*m.files('conveyor-client'), sep='\\n')"
    files = _run(python, "-c", owned).splitlines()
    assert {file.partition("/")[0].partition("-")[0] for file in files} == {"conveyor_client"}
    assert len(packages) <= 20
