"""Chromium: a pool of confined browsers, and one page in a context of its own."""
