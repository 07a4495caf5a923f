"""The HTTP/1.1 server: strict framing, bounded connections, and an ASGI application behind it.

The problem. Hypercorn, which Conveyor used before, spoke HTTP/2 without any timeout, accepted
ambiguous framing, never closed a connection whose body was refused, and let such a connection
outlive SIGTERM (rows C9 and C10 of docs/hardening.md): an idle HTTP/2 connection was open after
260 s, and a process was alive 60 s after SIGTERM.

The alternatives (docs/decisions/0019-own-http-server.md). A patch of Hypercorn was not possible,
because the defects were in its structure. A proxy in front of every deployment was not acceptable,
because `conveyor dev` must be safe by itself. The price of this server is that it has no HTTP/2; a
proxy in front can offer it.

The design. One task serves one connection. It reads a head, calls the ASGI application (Quart), and
closes the connection in a bounded time, whatever the client does.

The modules, from the bytes up: `exchange` parses the head of a request, decodes its body
(Content-Length and chunks) and runs the request and its response as ASGI events. `connection`
accepts connections, limits how many there are, and serves the requests of each client in turn,
with a deadline in every state.
"""
