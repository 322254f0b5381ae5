"""Strings in, strings out: an engine, its options, and continuous batching."""

from specdec_jax.engine.config import EngineConfig
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.loading import load

__all__ = ['Engine', 'EngineConfig', 'load']
