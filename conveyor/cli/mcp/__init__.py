"""`conveyor mcp`: the tools of a running server for an agent (docs/mcp.md)."""
