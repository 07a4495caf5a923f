"""The house style as tests: what a reviewer would say every time, said once."""
