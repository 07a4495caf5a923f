"""Schedules: when a job runs next, and what a trigger does."""
