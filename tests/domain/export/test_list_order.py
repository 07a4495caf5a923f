"""ListOrder returns tasks in the order of their lists and leaves none out."""

from __future__ import annotations

from random import Random

import msgspec

from conveyor.domain.damage import DamagedTask
from conveyor.domain.export.list_order import ListOrder
from conveyor.domain.ids import BatchId, TaskId
from conveyor.domain.model import TaskStatus
from tests.builders import RUN, T0, a_task


def in_order(order: ListOrder, limit: int = 3) -> list[TaskId]:
    pages = list(order.pages(limit))
    assert all(len(page) == limit for page in pages[:-1])
    return [task_id for page in pages for task_id in page]


def test_tasks_are_ordered_by_batch_id_and_then_by_index() -> None:
    tasks = [a_task(index) for index in range(10)]
    later = [
        msgspec.structs.replace(a_task(100 + index), batch_id=BatchId("01"), index=index)
        for index in range(4)
    ]
    shuffled = [*later, *tasks]
    Random(1).shuffle(shuffled)
    order = ListOrder()
    for task in shuffled:
        order.add(task)

    assert in_order(order) == [task.task_id for task in (*tasks, *later)]
    assert in_order(order, 100) == in_order(order)


def test_tasks_are_ordered_by_index_although_others_are_missing() -> None:
    order = ListOrder()
    for index in (7, 2):
        order.add(a_task(index))

    assert in_order(order) == [a_task(2).task_id, a_task(7).task_id]


def test_a_row_whose_id_does_not_fit_its_index_comes_last() -> None:
    order = ListOrder()
    damaged = [
        DamagedTask(RUN, TaskId(str(number) * 32), 0, BatchId(""), 0, "", TaskStatus.FAILED, T0, T0)
        for number in (1, 2, 3)
    ]
    for task in (*damaged, a_task(0, task_id=TaskId("odd-id")), a_task(1)):
        order.add(task)

    ids = in_order(order)
    assert sorted(ids) == sorted([*(task.task_id for task in damaged), "odd-id", a_task(1).task_id])
    assert ids[-1] == "odd-id"
