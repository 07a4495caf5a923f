"""The actor runtime: mailboxes, supervision and inspection, knowing nothing of Conveyor."""

from actors.runtime.child import Child, State, nest
from actors.runtime.cleanup import bounded_cleanup
from actors.runtime.dynamic import (
    DynamicSupervisor,
    Exhaustion,
    NameTaken,
    NeverReady,
    NotSupervising,
)
from actors.runtime.inspect import Node, render, tree
from actors.runtime.life import RestartsExhausted
from actors.runtime.mailbox import (
    Address,
    Inbox,
    Mailbox,
    MailboxFull,
    NoAnswer,
    Reply,
    drain_nowait,
    receive_batch,
)
from actors.runtime.restart import Intensity, Policy, Strategy
from actors.runtime.supervisor import Supervisor

__all__ = [
    "Address",
    "Child",
    "DynamicSupervisor",
    "Exhaustion",
    "Inbox",
    "Intensity",
    "Mailbox",
    "MailboxFull",
    "NameTaken",
    "NeverReady",
    "NoAnswer",
    "Node",
    "NotSupervising",
    "Policy",
    "Reply",
    "RestartsExhausted",
    "State",
    "Strategy",
    "Supervisor",
    "bounded_cleanup",
    "drain_nowait",
    "nest",
    "receive_batch",
    "render",
    "tree",
]
