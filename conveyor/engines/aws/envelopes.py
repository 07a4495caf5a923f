"""What messages look like on SQS: a schema version, and a ref. No secret, nothing of a customer."""

from __future__ import annotations

import msgspec

from conveyor.domain.model import TaskRef

VERSION = 1


class _Envelope(msgspec.Struct):
    v: int
    ref: msgspec.Raw


_decode = msgspec.json.Decoder(_Envelope).decode
_decode_ref = msgspec.json.Decoder(TaskRef).decode
_encode = msgspec.json.Encoder().encode


def sealed(ref: TaskRef) -> str:
    return _encode({"v": VERSION, "ref": ref}).decode()


def opened(body: str) -> TaskRef | None:
    """The ref; None for a message of a release that we are not, which others may understand."""
    try:
        envelope = _decode(body)
        return _decode_ref(envelope.ref) if envelope.v == VERSION else None
    except msgspec.DecodeError:
        return None
