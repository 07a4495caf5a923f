"""The JSON forms of requests and responses, without the transport
(docs/api.md).

`requests` decodes strictly, `responses` has the types, and `views` makes responses from rows.
"""

from __future__ import annotations
