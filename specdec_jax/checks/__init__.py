"""Checks of values that users give: numbers, types, names, memory."""
