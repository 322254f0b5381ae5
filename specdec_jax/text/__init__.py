"""Text and its sources: tokenizers, tasks, lines of files, metrics."""
