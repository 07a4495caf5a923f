"""Checks paid calls and budgets: calls are bounded and recorded, and runs stay within their budgets
(I51, I52, I59, I60, I65)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from conveyor.domain.budget import Budget, Unit
from conveyor.domain.changes import BudgetKey, ShareKey
from conveyor.domain.model import Problem, RunStatus, Task, TaskStatus
from conveyor.simulation.client_history import Fetch, History
from conveyor.simulation.invariant_monitor import StateChange

# How many calls beyond the limit of the gateway a worker may make until it knows the limit.
REFUSALS_A_WORKER = 4
CALLS_TO_OPEN = 40
"""Calls that are in progress when an outage begins, and calls that it takes to open the circuit
breakers."""
# The mean time between two probes during an outage. Probes are 1 s apart at first, 30 s at most.
PROBE_EVERY_S = 10.0
CALLERS_MAX = 4
"""Each caller has a circuit breaker of its own."""
PAGES_LOST_MAX = 8
"""How many pages of one task may be lost to killed workers, expired claims and settles without an
answer."""


def paid_calls_per_task_are_bounded(state: StateChange, fetch: Fetch) -> Iterator[str]:
    """I51: a page that was fetched is not fetched again, unless its worker was killed or its settle
    was lost, and then only a bounded number of times."""
    fetched = sum(
        other_fetch.outcome == "Scraped" for other_fetch in _others_of(state.history, fetch)
    )
    most = 0 if _is_explained(state.history) else PAGES_LOST_MAX
    if fetched > most:
        yield f"task {fetch.run_id}/{fetch.task_id} is fetched again after {fetched} pages"


def every_paid_call_is_on_record(state: StateChange) -> Iterator[str]:
    """I52: the credits that the gateway billed for a task equal those in its spend and in its
    history."""
    history = state.history
    if not (history.has_gateway and _is_explained(history)):
        return
    billed = _billed(history)
    for task in _fetched_tasks(state):
        paid = billed.get((task.run_id, task.task_id), 0)
        recorded = sum(attempt.credits for attempt in task.history)
        if not task.credits == recorded == paid:
            figures = f"spend {task.credits}, history {recorded}, billed {paid}"
            yield f"task {task.run_id}/{task.task_id}: {figures}"


def no_spend_exceeds_the_bill(state: StateChange) -> Iterator[str]:
    """I52: no task is charged more than the gateway billed."""
    billed = _billed(state.history) if state.history.has_gateway else {}
    for task in _fetched_tasks(state) if state.history.has_gateway else ():
        paid = billed.get((task.run_id, task.task_id), 0)
        if task.credits > paid:
            yield f"task {task.run_id}/{task.task_id}: spend {task.credits}, billed {paid}"


def no_task_fails_for_an_outage(state: StateChange) -> Iterator[str]:
    """I60: each attempt of a failed task is explained by a failure of its site. No attempt is
    counted because the gateway or the storage was unavailable, or the gateway's limit was
    reached."""
    for task in _fetched_tasks(state):
        if task.status is not TaskStatus.FAILED or _is_fault_of_input(task):
            continue
        blamed = sum(
            fetch.site_faults > 0
            for fetch in state.history.fetches
            if (fetch.run_id, fetch.task_id) == (task.run_id, task.task_id)
        )
        ours = sum(_is_ours(attempt.problem) for attempt in task.history)
        if task.attempts - ours > blamed:
            code = task.problem.code if task.problem is not None else None
            figures = f"{task.attempts} attempts and {blamed} faults of the site"
            yield f"task {task.run_id}/{task.task_id} failed ({code}) after {figures}"


def calls_beyond_the_plan_are_rare(state: StateChange) -> Iterator[str]:
    """I59: if the gateway states its limit and nothing else happens, each worker finds the limit
    with a few refused calls and then keeps to it."""
    history = state.history
    if not _is_explained(history) or history.gateway_lies:
        return
    most = REFUSALS_A_WORKER * history.workers_count + len(history.fetches) // 10
    for key, count in Counter(refusal.key for refusal in history.gateway_refusals).items():
        if count > most:
            yield f"the gateway refused {count} calls of {key[-8:]}, limit {most}"


def an_unavailable_gateway_gets_few_calls(state: StateChange) -> Iterator[str]:
    """I60: during an outage of the gateway, a few calls discover it, and after that only single
    probes are sent."""
    history = state.history
    if not _is_explained(history):
        return
    tried = sum(fetch.outage_faults for fetch in history.fetches) - len(history.gateway_refusals)
    seconds = history.gateway_away_s
    most: float = CALLS_TO_OPEN * history.workers_count * (1 + history.gateway_outages)
    most += seconds / PROBE_EVERY_S * history.workers_count * CALLERS_MAX
    if tried > most:
        yield f"{tried} calls in outages of {seconds:.0f} s, limit {most:.0f}"


def _is_fault_of_input(task: Task) -> bool:
    """Whether the gateway rejected the parameters of the task; such a task fails without any
    fault."""
    return task.problem is not None and task.problem.code == "unsupported_param"


def _is_ours(problem: Problem | None) -> bool:
    """Whether the attempt failed because it crashed its handler or lost its workers."""
    return problem is not None and problem.code in {"worker_lost", "worker_crashed"}


def _is_explained(history: History) -> bool:
    """Whether nothing happened to processes and engines that could cost a page."""
    return history.is_isolated and not history.kills_count


def _others_of(history: History, fetch: Fetch) -> Iterator[Fetch]:
    name = (fetch.run_id, fetch.task_id)
    return (
        other_fetch
        for other_fetch in history.fetches
        if other_fetch is not fetch and (other_fetch.run_id, other_fetch.task_id) == name
    )


def _billed(history: History) -> dict[tuple[str, str], int]:
    billed: dict[tuple[str, str], int] = {}
    for fetch in history.fetches:
        name = (fetch.run_id, fetch.task_id)
        billed[name] = billed.get(name, 0) + fetch.credits_billed
    return billed


def _fetched_tasks(state: StateChange) -> Iterator[Task]:
    """The tasks of completed runs that were fetched for themselves: not inherited from an earlier
    run, and no duplicates."""
    for run in state.after.runs.values():
        if run.status is RunStatus.COMPLETED and not state.is_deleted(run):
            for task in state.after.tasks_by_run.get(run.run_id, []):
                if task.claim and task.source_run_id is None and task.duplicate_of is None:
                    yield task


# Budgets: what is left and the shares of workers add up to the cap, and no run spends more (I65).


def a_budget_adds_up_to_its_cap(state: StateChange) -> Iterator[str]:
    """I65: what is left of a budget is never negative, and together with all shares it equals the
    cap, also while the cap changes."""
    run_ids = {
        (change.new or change.old).run_id
        for kind in (BudgetKey, ShareKey)
        for change in state.changed(kind)
    }
    for budget in _budgets(state):
        run = state.after.run_by_id.get(budget.run_id)
        if budget.run_id not in run_ids or run is None or state.is_deleted(run):
            continue
        taken = sum(
            share.taken
            for share in state.after.rows[ShareKey].values()
            if share.run_id == budget.run_id
        )
        if budget.left < 0 or budget.left + taken != budget.cap:
            figures = f"{budget.left} left and {taken} in shares, cap {budget.cap}"
            yield f"the budget of run {budget.run_id} does not add up: {figures}"


def no_run_spends_above_its_cap(state: StateChange) -> Iterator[str]:
    """I65: the gateway bills no run for more than its budget."""
    billed: dict[str, int] = {}
    for fetch in state.history.fetches:
        billed[fetch.run_id] = billed.get(fetch.run_id, 0) + fetch.credits_billed
    for budget in _budgets(state):
        spent = billed.get(budget.run_id, 0)
        if budget.unit is Unit.CREDITS and spent > budget.cap:
            yield f"run {budget.run_id} was billed {spent} credits, budget {budget.cap}"


def _budgets(state: StateChange) -> Iterator[Budget]:
    yield from state.after.rows[BudgetKey].values()
