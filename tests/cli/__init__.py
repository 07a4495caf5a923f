"""The command line, as people use it: the real program, in its own process."""
