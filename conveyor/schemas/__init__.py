"""The wire: what requests and responses look like as JSON, and nothing of how they travel
(docs/api.md).

`requests` decodes strictly, `responses` holds the shapes, `views` makes them from rows.
"""

from __future__ import annotations
