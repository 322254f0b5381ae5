"""Checks of what users give: numbers, kinds of values, names."""
