"""A small HTTP/1.1 client on Trio, guarded against SSRF where the socket is opened (SPEC 8.2)."""
