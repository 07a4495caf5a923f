"""The dashboard: HTML pages under `/ui`, rendered by the API process (docs/dashboard.md)."""
