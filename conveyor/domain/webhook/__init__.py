"""Webhooks: payloads, signatures, keys and deliveries."""
