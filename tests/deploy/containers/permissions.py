"""Removes each granted action of a role in turn, and checks that `conveyor check` and the log of
the process report it (docs/deploy.md, Permissions).

    python -m tests.deploy.containers.permissions

removes all of them and prints the table of docs/deploy.md. `make test-deploy` removes a few.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from conveyor.cli.demo import site_in_a_thread
from tests.deploy.containers.stage import BATCHES, Stage, a_stage, until
from tests.deploy.containers.uses import USES, Caller, start_process


@contextmanager
def without(stage: Stage, role: str, *actions: str) -> Iterator[None]:
    """Removes these actions from the policies of the role while the block runs."""
    document = stage.document(role)
    batches = [local for action, local in BATCHES[role].items() if action not in actions]
    try:
        stage.put_document(role, role, _without(document, actions))
        stage.put_policy(role, "local-dialect", batches or ["none:None"])
        yield
    finally:
        stage.put_document(role, role, document)
        stage.allow_batches()


def _without(document: dict[str, Any], removed: tuple[str, ...]) -> dict[str, Any]:
    reduced = copy.deepcopy(document)
    for statement in reduced["Statement"]:
        actions = statement["Action"]
        listed = [actions] if isinstance(actions, str) else actions
        statement["Action"] = [item for item in listed if item not in removed] or ["none:None"]
    return reduced


@dataclass(frozen=True, slots=True)
class Removal:
    """The output of the program when an action is missing."""

    role: str
    action: str
    check: str
    log: str

    @property
    def is_named_by_the_check(self) -> bool:
        return f"missing permission: {self.action}" in self.check

    @property
    def is_named_in_the_log(self) -> bool:
        return f"missing permission: {self.action}" in self.log


def remove(stage: Stage, caller: Caller, role: str, action: str) -> Removal:
    """Uses the action while it is missing, and waits until the log of the role reports it."""
    granted = USES[role][action]
    act = granted.use(caller)
    stage.restart_ended(role)
    read_from = {container.name: len(container.text()) for container in stage.of_role(role)}
    with without(stage, role, action, *([granted.beside] if granted.beside else [])):
        check = stage.run(role, "check").stdout
        if granted.use is start_process:
            ended = stage.run(role, role)
            return Removal(role, action, check, ended.stdout + ended.stderr)
        act()

        def new_lines() -> str:
            logs = [item.text()[read_from[item.name] :] for item in stage.of_role(role)]
            text = "".join(logs)
            return text if f"missing permission: {action}" in text else ""

        try:
            log = until(f"{role} to name {action}", new_lines)
        except AssertionError:
            log = ""
    return Removal(role, action, check, log)


def row(removal: Removal) -> str:
    granted = USES[removal.role][removal.action]
    log = "yes" if removal.is_named_in_the_log else "NO"
    check = "yes" if removal.is_named_by_the_check else "NO"
    return f"| {removal.role} | `{removal.action}` | {granted.purpose} | {check} | {log} |"


def main(chosen: list[str]) -> None:
    sys.stdout.write("| role | action | what for | check names it | log names it |\n")
    sys.stdout.write("|---|---|---|---|---|\n")
    with tempfile.TemporaryDirectory() as folder, a_stage(Path(folder)) as stage:
        stage.deploy()
        stage.allow_batches()
        api, *_ = [stage.start(role) for role in ("api", "worker", "worker")]
        headers = {"X-API-Key": stage.key}
        url = f"http://127.0.0.1:{api.port}"
        with (
            site_in_a_thread() as site,
            httpx.Client(base_url=url, headers=headers, timeout=60) as http,
        ):
            for role, uses in USES.items():
                for action in uses:
                    if not chosen or action in chosen:
                        removal = remove(stage, Caller(stage, http, site), role, action)
                        sys.stdout.write(f"{row(removal)}\n")
                        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
