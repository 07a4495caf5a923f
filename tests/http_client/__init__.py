"""The HTTP client against raw sockets that misbehave on purpose."""
