"""What surrounds the service: sites, gateways, callers' HTTP."""
