"""Tells schemathesis which texts are URLs that a task could have."""

from __future__ import annotations

import schemathesis
from hypothesis import strategies as st

URLS = [f"https://pages.example/{name}" for name in ("", "a", "b?c=d", "e/f")]

schemathesis.openapi.format("uri", st.sampled_from(URLS))
