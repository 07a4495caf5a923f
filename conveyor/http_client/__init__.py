"""A small HTTP/1.1 client on Trio, guarded against SSRF where the socket is opened
(SPEC.md 5.2).

The problem. Conveyor fetches pages from hostile sites on behalf of many callers. A general client
fails here in four ways. It checks a name and then lets the socket layer resolve the name again, so
that the second answer can be a private address. It shares connections between callers. It reads
proxies from the environment. It decodes bodies without a bound on CPU time.

The alternatives (docs/decisions/0017-own-http-client.md). httpx with a custom transport does not
give control of connection reuse and resolution. aiohttp needs asyncio, and Conveyor runs on Trio.
`python -m bench httpclient` measures the CPU time of one request for a 20 KB page over a kept
connection (bench/results/httpclient.svg):

    in flight      this client    aiohttp on uvloop    httpx
    http, 1            95.2 us               146 us      464 us
    http, 16           53.8 us              78.8 us      983 us
    http, 200          61.1 us               128 us   23,801 us
    http, 1,000        60.3 us               148 us   not measured
    https, 200         91.4 us               156 us   24,478 us

How one request passes the modules:

1. `exchange` encodes the request and refuses headers that would change its framing.
2. `connection_limits` grants a slot of the caller at the origin, then a slot of the pool, and
   returns an idle connection of this caller if there is one.
3. Without an idle connection, `resolver` resolves the name and checks every address, and `stream`
   connects to one of exactly these addresses and starts TLS (`stream.Dialer`).
4. `exchange` sends the request, reads from `stream` under the deadline timer, and frames the
   response. It refuses framing that is ambiguous (`exchange.ResponseParser`).
5. `response_body` decodes the body under limits of size, ratio and CPU time. `large_bodies` shares
   the memory and the decoder threads among the callers (`fair_permits`).
6. `pool` keeps the connection only if the response ended exactly at the last byte received.

The deadline timer. A Trio cancel scope for each request would cost as much CPU time as the rest of
the request. Each wait for a peer is therefore an entry in one dictionary, and one task interrupts
the entries that are due (`exchange.DeadlineTimer`). Waits without a connected peer are rare and
use an ordinary cancel scope (`exchange.until`).

Why connections are per caller. A hostile site can send a second response into a connection before
the next request is written. On a shared connection, the next caller would accept that response as
its own page: in row B5 of docs/hardening.md, 31 of 100 pages of a victim were not its own. TLS
sessions are per caller for a similar reason (`stream.Dialer`).
"""
