"""Tests of the DynamoDB store: behaviour that no emulator shows, and the layout of its table."""
