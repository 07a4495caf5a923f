"""Our own gateway, with real browsers, against a local site that needs JavaScript."""
