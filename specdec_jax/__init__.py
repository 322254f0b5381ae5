"""Speculative decoding of T5-family models in JAX."""
