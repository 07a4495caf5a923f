"""The mutants: each one is a defect, each one is found, and none leaves anything behind."""
