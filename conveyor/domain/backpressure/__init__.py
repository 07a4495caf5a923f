"""What holds calls back: the limits and outages of gateways, circuits, budgets."""
