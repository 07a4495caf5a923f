"""The table of routes, by resource."""
