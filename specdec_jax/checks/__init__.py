"""Checks the values that users give, and whether the memory is sufficient."""
