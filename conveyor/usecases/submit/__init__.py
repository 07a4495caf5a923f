"""The path of a request that brings tasks: validation, staging, admission."""
