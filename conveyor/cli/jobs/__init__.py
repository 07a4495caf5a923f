"""`conveyor jobs`: the commands that call a running server."""
