"""Drafters, the sources of proposals."""
