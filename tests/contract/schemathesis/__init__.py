"""Hooks for schemathesis."""
