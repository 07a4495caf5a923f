"""Tests of the gateways and the webhook notifier with a scripted server on loopback."""
