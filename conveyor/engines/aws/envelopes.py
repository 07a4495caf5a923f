"""What messages look like on SQS: a schema version, and a ref. No secret, nothing of a customer."""

from __future__ import annotations

from enum import Enum

import msgspec

from conveyor.domain.model import TaskRef

VERSION = 1


class Unread(Enum):
    """Why there is no ref in a message."""

    OTHER_RELEASE = "others may understand it"
    GARBAGE = "nobody will ever understand it"


class _Envelope(msgspec.Struct):
    v: int
    ref: msgspec.Raw


_decode = msgspec.json.Decoder(_Envelope).decode
_decode_ref = msgspec.json.Decoder(TaskRef).decode
_encode = msgspec.json.Encoder().encode


def sealed(ref: TaskRef) -> str:
    return _encode({"v": VERSION, "ref": ref}).decode()


def opened(body: str) -> TaskRef | Unread:
    try:
        envelope = _decode(body)
        return _decode_ref(envelope.ref) if envelope.v == VERSION else Unread.OTHER_RELEASE
    except msgspec.DecodeError:
        return Unread.GARBAGE
