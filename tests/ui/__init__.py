"""The dashboard: pages, forms, access and live updates."""
