"""The AWS engine: one client for all services, over a transport of its own
(docs/engines.md, AWS client)."""

from __future__ import annotations
