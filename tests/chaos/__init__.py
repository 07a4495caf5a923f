"""The real program, mistreated: killed at every call site, at random, and started from images."""
