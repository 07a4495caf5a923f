"""The concrete actors, one file each, with the memory engine in virtual time."""
