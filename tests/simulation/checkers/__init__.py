"""Each checker on its own: what it must report, and what it must let pass."""
