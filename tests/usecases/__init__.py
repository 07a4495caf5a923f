"""The use cases over the memory engine, with faults wrapped around it."""
