"""The actor runtime: mailboxes, supervision and inspection. It knows nothing about Conveyor."""

from actors.runtime.child import Child, RestartsExhausted, State, bounded_cleanup, nest
from actors.runtime.dynamic_supervisor import (
    DynamicSupervisor,
    NameTaken,
    NeverReady,
    NotSupervising,
    OnExhausted,
)
from actors.runtime.inspect import Node, render, tree
from actors.runtime.mailbox import (
    Address,
    AskTimedOut,
    Inbox,
    Mailbox,
    MailboxFull,
    Reply,
    drain_nowait,
    receive_batch,
)
from actors.runtime.restart import Intensity, Policy, Strategy
from actors.runtime.supervisor import Supervisor

__all__ = [
    "Address",
    "AskTimedOut",
    "Child",
    "DynamicSupervisor",
    "Inbox",
    "Intensity",
    "Mailbox",
    "MailboxFull",
    "NameTaken",
    "NeverReady",
    "Node",
    "NotSupervising",
    "OnExhausted",
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
