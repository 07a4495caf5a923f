"""The SDK with a real server, and with one that gives scripted answers."""
