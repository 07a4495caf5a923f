"""What holds calls back: permits, host limits, budgets, circuits."""
