"""Attacks on a running server by hostile callers, sites, gateways and disks."""
