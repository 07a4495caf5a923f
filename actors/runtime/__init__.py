"""The actor runtime: mailboxes, supervision and inspection. It knows nothing about Conveyor."""

from actors.runtime.child import (
    Child,
    Intensity,
    Policy,
    RestartsExhausted,
    State,
    Strategy,
    bounded_cleanup,
    nest,
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
from actors.runtime.supervisor import (
    DynamicSupervisor,
    NameTaken,
    NeverReady,
    NotSupervising,
    OnExhausted,
    Supervisor,
)

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
