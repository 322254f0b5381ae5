"""The command line: what can be run, gin's flags, and checks of their names."""
