"""Consoles, tables, records and plots: how results are shown and kept."""
