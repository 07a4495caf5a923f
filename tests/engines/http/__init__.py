"""The gateways and the notifier against a scripted server on loopback."""
