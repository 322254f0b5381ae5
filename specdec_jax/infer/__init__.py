"""Decodes files of lines, and tasks, with an engine.

`DecodeConfig` describes a run, and `decode` runs it. A run can be killed at any
moment and started again.
"""

from specdec_jax.engine.options import Options
from specdec_jax.infer.data import DecodeConfig, open_tokenizer
from specdec_jax.infer.run import decode

__all__ = ['DecodeConfig', 'Options', 'decode', 'open_tokenizer']
