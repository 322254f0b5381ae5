"""Language models that share one contract."""
