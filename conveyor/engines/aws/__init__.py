"""The AWS engine: one seam to every service, a lean data plane behind it
(docs/engines.md, AWS client)."""

from __future__ import annotations
