"""What happens to a request that brings work: checks, staging, admission."""
