"""The use cases: load rows, decide, commit (docs/api.md; docs/architecture.md, The worker).

They start no background task.
"""
