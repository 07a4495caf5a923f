"""The folder that `scrape` writes."""

from __future__ import annotations

from pathlib import Path

from conveyor.cli.result_files import write_results
from conveyor.ports.gateway import Scraped
from tests.usecases.world import a_world, submit, work


async def test_a_body_has_the_ending_that_the_api_and_exports_give_it(tmp_path: Path) -> None:
    world = a_world()
    run = (await submit(world.env, 1)).run
    page = Scraped(status=200, content_type="application/xml; charset=utf-8", body=b"<a/>")
    await work(world.env, run, lambda _: page)

    await write_results(world.env, run, tmp_path)

    assert (tmp_path / "000000.xml").read_bytes() == b"<a/>"
