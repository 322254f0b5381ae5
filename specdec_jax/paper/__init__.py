"""The paper's numbers, tables and figures, compared with this project's."""
