"""`conveyor mcp`: offers a running server to an agent, over stdio or streamable HTTP
(docs/mcp.md)."""

from __future__ import annotations

import asyncio
import socket

import click
import uvicorn
from mcp.server.mcpserver import MCPServer

from conveyor.cli.jobs.context import server_options
from conveyor.cli.mcp.tools import Tools, make_server
from conveyor.sdk.connection import check_key, check_url

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@click.command()
@server_options
@click.option("--http", is_flag=True, help="Serve streamable HTTP at /mcp instead of stdio.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where --http listens.")
@click.option("--port", type=click.IntRange(0, 65_535), default=8090, show_default=True)
def mcp(server: str, api_key: str, http: bool, host: str, port: int) -> None:
    """Offer a running server to an agent (Model Context Protocol).

    Over HTTP, a request may carry its own API key as a bearer token. If --host is no loopback
    address, every request must: the key of the environment is not lent to the network.
    """
    try:
        check_url(server)
        check_key(api_key)
    except ValueError as error:
        raise click.ClickException(f"{error}. See --server and --api-key.") from None
    is_open = http and host not in LOOPBACK
    tools = make_server(Tools(server, None if is_open else api_key))
    if http:
        _serve(tools, host, port)
    else:
        tools.run("stdio")


def _serve(tools: MCPServer, host: str, port: int) -> None:
    """Serves HTTP until a signal arrives."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise click.ClickException(f"Cannot listen on {host}:{port}: {error}") from None
    with listener:
        shown_host = f"[{host}]" if ":" in host else host
        address = f"http://{shown_host}:{listener.getsockname()[1]}/mcp"
        click.echo(f"listening on {address}", err=True)
        app = tools.streamable_http_app(host=host)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)
        asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))
