"""Strings in, strings out: an engine, its options, and continuous batching."""

from specdec_jax.engine.engine import Engine, Model, joined, load_model

__all__ = ['Engine', 'Model', 'joined', 'load_model']
