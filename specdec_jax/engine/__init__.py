"""Strings in, strings out: an engine, its options, and continuous batching."""

from specdec_jax.engine.engine import Engine
from specdec_jax.engine.loading import load
from specdec_jax.engine.options import EngineConfig

__all__ = ['Engine', 'EngineConfig', 'load']
