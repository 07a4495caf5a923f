"""The SDK against a real server, and against one that answers as it is told to."""
