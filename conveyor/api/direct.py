"""Bodies that the storage hands out itself: a redirect for those who ask, minted on every read.

Not for everybody
(docs/api.md, Results): clients of the contract follow none, and would save its empty body.
"""

from __future__ import annotations

from conveyor.api.call import Call, Reply
from conveyor.domain import limits


async def direct_reply(
    call: Call, key: str, *, content_type: str, name: str, until: float
) -> Reply | None:
    """To where the body lies, which it does `until` then; None when it has to come through us."""
    if not call.flag("redirect"):
        return None
    address = await call.env.blobs.download_url(
        key,
        content_type=content_type,
        filename=name,
        expires_at=min(call.env.now() + limits.DIRECT_URL_TTL_S, until),
    )
    return None if address is None else Reply(302, headers={"Location": address})
