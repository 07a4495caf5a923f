"""Mutation tests: each mutant is a defect that the simulator must find."""
