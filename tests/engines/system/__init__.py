"""The clocks and the vault."""
