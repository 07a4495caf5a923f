"""The concrete actors, one file each, over the memory engine and in virtual time."""
