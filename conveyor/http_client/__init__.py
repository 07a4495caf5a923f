"""A small HTTP/1.1 client on Trio, guarded against SSRF where the socket is opened
(SPEC.md 5.2)."""
