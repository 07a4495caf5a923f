"""Tests of the actor runtime, with toy actors only."""
