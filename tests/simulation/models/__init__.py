"""Tests of the models of the services."""
