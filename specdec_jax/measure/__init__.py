"""Measures the times of calls and loops, acceptance rates, and memory."""
