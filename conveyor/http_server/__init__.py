"""The HTTP/1.1 server: strict framing, bounded connections, and an ASGI application behind it.

Why not a ready-made server: the one that was here before spoke HTTP/2 without any timeout, hid
ambiguous framing behind a lenient parser, never closed a connection whose body was refused, and let
such a connection outlive SIGTERM. Here a connection is one task that reads a head, calls the
application, and ends the connection in a bounded time whatever the client does.

The modules, from the bytes up: `head` (request line and headers), `body` (Content-Length and
chunks), `exchange` (one request and its response, as ASGI events), `connection` (one client's
requests in turn, with a deadline in every state), `listener` (accepting, and how many at once).
"""
