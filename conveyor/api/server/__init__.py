"""The HTTP server around the routes: requests, bodies, errors, callers."""
