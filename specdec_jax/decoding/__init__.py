"""The decoding loops: plain and speculative, each one jitted program."""
