"""The paper beside this project: its numbers, tables and figures."""
