"""Reproduces the paper's tables and figures, beside the paper's own numbers."""
