"""`conveyor health`: asks the process of this role whether it is alive, for health checks of
containers (docs/deploy.md, The image)."""

from __future__ import annotations

import http.client

import click

from conveyor.config import Settings

# Shorter than the timeout of the image's health check, so that the reason is printed.
TIMEOUT_S = 4.0
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 (nothing is bound here)


@click.command()
@click.pass_obj
def health(settings: Settings) -> None:
    """Check that the process in this container answers.

    It asks `/healthz` on the port of the role in CONVEYOR_ROLE: the metrics port of a worker,
    otherwise the port of the API.
    """
    port = settings.metrics_port if settings.role == "worker" else settings.port
    if port is None:
        raise click.ClickException("A worker answers only with CONVEYOR_METRICS_PORT.")
    host = _ANY_ADDRESS.get(settings.host, settings.host)
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/healthz")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise click.ClickException(f"{host}:{port} does not answer: {error}") from None
    finally:
        connection.close()
    if status != 200:
        raise click.ClickException(f"{host}:{port} answered {status}.")
