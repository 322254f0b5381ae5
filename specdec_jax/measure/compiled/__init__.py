"""Compiles programs for devices that are not there, and counts their costs."""
