"""The style rules of the project as tests."""
