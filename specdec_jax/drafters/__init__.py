"""Drafters: where a `Draft` comes from."""
