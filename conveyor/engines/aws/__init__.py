"""The AWS engine: one seam to every service, a lean data plane behind it (SPEC 5.9)."""

from __future__ import annotations
