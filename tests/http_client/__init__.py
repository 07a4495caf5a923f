"""The HTTP client against raw sockets with scripted misbehaviour."""
