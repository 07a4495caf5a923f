"""The tests of Conveyor; tests/README.md says where a new test goes."""
